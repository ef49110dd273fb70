"""Checks after a restart that batches are replayed with their recorded weights."""

import logging

from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.errors import ReplayMismatch
from rollq.buffer.roles import TrainerBuffer
from rollq.consumer.claims.trainer_lease import TrainerLease
from rollq.consumer.settings import ConsumerSettings, OnReplayMismatch

log = logging.getLogger(__name__)


def first_mode(buffer: TrainerBuffer, settings: ConsumerSettings, from_step: int, digest: str) -> ResumeMode:
    """The mode in which to resume with weights `digest`: the mode in the settings, or `regenerate` if the weights
    differ from the recorded weights and `on_replay_mismatch` is `regenerate`.

    Raises `ReplayMismatch`.
    """
    recorded = buffer.recorded_digest(from_step) if settings.mode == "replay" else None
    if recorded in (None, digest):
        return settings.mode
    return settings.mode if _judge(settings.on_replay_mismatch, from_step, "the batches after it") else "regenerate"


class Replay:
    """Compares the weights published during a replay with the recorded weights."""

    def __init__(self, lease: TrainerLease, on_mismatch: OnReplayMismatch) -> None:
        self._lease = lease
        self._on_mismatch = on_mismatch
        self._last = lease.epoch.replayed_through
        if self._last > lease.epoch.from_step:
            log.info(
                "the recorded batches of steps %d to %d are replayed as they are, without a check of the weights",
                lease.epoch.from_step + 1,
                self._last,
            )

    def check(self, version: int, digest: str) -> None:
        """Compare weights that are about to be published. Raises `ReplayMismatch`."""
        if version >= self._last:  # the next batch is new
            return
        recorded = self._lease.buffer.recorded_digest(version)
        if recorded in (None, digest):
            return
        if not _judge(self._on_mismatch, version, f"the recorded batches of steps {version + 1} to {self._last}"):
            self._lease.buffer.regenerate_replays(self._lease.epoch, version)
        self._last = version  # reported once


def _judge(on_mismatch: OnReplayMismatch, version: int, batches: str) -> bool:
    """Whether to replay `batches` although the weights of `version` differ from the recorded weights."""
    problem = (
        f"the weights of version {version} differ from those published earlier as version {version} (a change of "
        "publish_dtype or max_file_bytes causes this too)"
    )
    if on_mismatch == "fail":
        raise ReplayMismatch(
            f'{problem}, but {batches} belong to the earlier ones: resume with mode = "return" or "regenerate", or '
            'set on_replay_mismatch = "warn" or "regenerate"'
        )
    if on_mismatch == "warn":
        log.warning(
            "%s: %s are replayed anyway, and count as no older than they were (on_replay_mismatch = warn). "
            "Training that is not deterministic always differs",
            problem,
            batches,
        )
        return True
    log.warning("%s: the prompts of %s are sampled again (on_replay_mismatch = regenerate)", problem, batches)
    return False

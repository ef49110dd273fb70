"""Starts the epoch of a trainer's launch: rank 0 begins it once no other trainer holds the run, and other ranks join
it."""

import logging
import secrets
import threading
import time
from collections.abc import Callable

from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.trainer_process import Holder
from rollq.buffer.calls.training import TRAINER_LEASE_S
from rollq.buffer.errors import ClaimTimeout, ConfigError, TrainerHeld
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.store.waiter import POLL_S, Waiter
from rollq.buffer.weights.store import StoredWeights
from rollq.consumer.claims.replay_check import first_mode
from rollq.consumer.settings import ConsumerSettings

log = logging.getLogger(__name__)

SPARE_S = 5.0
"""How much longer than a lease to wait for it to expire."""


def begin_epoch(
    buffer: TrainerBuffer,
    settings: ConsumerSettings,
    store: Callable[[], StoredWeights] | None,
    resume_from: int,
    lineage: str | None,
) -> TrainerEpoch:
    """Start this launch's epoch at step `resume_from` with the weights that `store` stores.

    Other ranks have no `store`, and join the epoch of rank 0.
    """
    if store is None:
        assert settings.launch_id is not None
        epoch = _join_epoch(buffer, settings.launch_id, settings.timeout_s)
    else:
        wait_for_holder(buffer, settings, buffer.closed)
        stored = store()
        epoch = buffer.begin_epoch(
            trainer_id=settings.trainer_id,
            launch_id=settings.launch_id or secrets.token_hex(8),
            from_step=resume_from,
            mode=first_mode(buffer, settings, resume_from, stored.digest),
            uri=stored.uri,
            digest=stored.digest,
            takeover=settings.takeover,
            lineage=lineage,
            accept_new_store=settings.accept_new_store,
        )
    if epoch.from_step != resume_from:
        raise ConfigError(
            f"launch_id {epoch.launch_id!r} has started at step {epoch.from_step}, not at {resume_from}: "
            "a new launch needs a new launch_id"
        )
    return epoch


def wait_for_holder(buffer: TrainerBuffer, settings: ConsumerSettings, stop: threading.Event) -> None:
    """Wait until no trainer holds the run. Return at once if `begin_epoch` can decide.

    A process on another machine, or in another container, cannot be looked up: if it was killed, its lease expires
    within `TRAINER_LEASE_S`. Raises `TrainerHeld` if the trainer's process lives or still renews its lease, and when
    `stop` is set.
    """
    first = buffer.holder()
    if first is None or settings.takeover or first.has_ended:
        return
    if settings.launch_id == first.launch_id or first.left_s <= 0:
        return
    if first.is_here:
        raise TrainerHeld(buffer.held_by(first))
    log.warning("%s cannot be looked up from here; waiting up to %.0f s for its lease to expire", first, first.left_s)
    _wait_for_expiry(buffer, first, stop)


def _wait_for_expiry(buffer: TrainerBuffer, first: Holder, stop: threading.Event) -> None:
    """Wait until the lease of `first`, which another process may renew, expires."""
    give_up_s = time.monotonic() + min(first.left_s, TRAINER_LEASE_S) + SPARE_S
    while (holder := buffer.holder()) and holder.left_s > 0:
        if holder.epoch != first.epoch or holder.deadline_ms > first.deadline_ms or time.monotonic() > give_up_s:
            raise TrainerHeld(buffer.held_by(holder))
        if stop.wait(min(holder.left_s, POLL_S)):
            raise TrainerHeld(f"stopped while {holder} held the run")


def _join_epoch(buffer: TrainerBuffer, launch_id: str, timeout_s: float | None) -> TrainerEpoch:
    with buffer.events() as events:
        waiter = Waiter(
            events,
            stop=buffer.closed,
            timeout_s=timeout_s,
            explain=lambda: f"rank 0 of launch {launch_id!r} has not started its epoch yet",
        )
        for _ in waiter:
            if epoch := buffer.join_epoch(launch_id):
                return epoch
    raise ClaimTimeout(f"gave up after {waiter.elapsed_s:.0f} s: {waiter.reason}")

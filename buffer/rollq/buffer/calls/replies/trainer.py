"""A trainer's hold on the run, and the weights that it has published."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The weights that workers should serve.

    `awaited` holds digests of later versions that the trainer, replaying recorded batches, may publish again.
    """

    epoch: int
    version: int
    digest: str
    uri: str
    awaited: Mapping[int, str] = field(default_factory=dict)

    def awaits(self, epoch: int, version: int, digest: str) -> bool:
        """Whether the trainer may publish these weights again: an engine that has the weights may keep them until
        then."""
        return epoch < self.epoch and version > self.version and self.awaited.get(version) == digest


@dataclass(frozen=True, slots=True)
class TrainerEpoch:
    """A trainer's hold on the run: the fencing token of the trainer's calls. `from_step` is its checkpoint's step;
    later batches, up to step `replayed_through`, are served as recorded."""

    epoch: int
    nonce: str
    from_step: int
    trainer_id: str
    launch_id: str
    replayed_through: int = 0

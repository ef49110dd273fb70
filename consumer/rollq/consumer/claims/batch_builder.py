"""Builds a batch from claimed groups: reads this rank's share, at once or part by part."""

from dataclasses import replace

from rollq.buffer.calls.replies.claims import Claimed
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.content import BatchContent
from rollq.consumer.batches.sequences import TokenStaleness
from rollq.consumer.claims.group_reader import GroupReader
from rollq.consumer.claims.prefetch import Prefetch
from rollq.consumer.claims.trainer_lease import TrainerLease
from rollq.consumer.settings import ConsumerSettings


class BatchBuilder:
    """Builds one batch. Data read for one part is not read again for the next."""

    def __init__(self, lease: TrainerLease, prefetch: Prefetch, settings: ConsumerSettings) -> None:
        self._lease = lease
        self._settings = settings
        self._reader = GroupReader((), lease.buffer, prefetch)
        self._read = 0  # number of groups in the reader
        self._content: BatchContent | None = None

    def build(self, claimed: Claimed, first: int = 0, end: int | None = None) -> Batch:
        """Build the batch up to group `end` (default: all of it), which trains the groups from `first` on, and read
        this rank's share of these groups. Raises `CorruptGroup` only for groups that every rank finds unreadable.
        """
        settings, reader = self._settings, self._reader
        groups = claimed.groups[:end]
        reader.add(groups[self._read :])
        self._read = len(groups)
        whole = Batch.build(
            claimed.step,
            groups,
            reader=reader,
            staleness=[TokenStaleness(claimed.step, *counting) for counting in claimed.counting[:end]],
            settings=settings.advantages,
            rank=settings.rank,
            world_size=settings.world_size,
            reduction=settings.reduction,
            claim_round=claimed.claim_round,
            ends=claimed.parts,
            before=self._content,
        )
        batch = replace(whole, part=tuple(range(first, len(groups))))
        share = batch.share_groups
        batch.content.keep(share, reader.read(share) if settings.world_size == 1 else reader.read_share(share))
        if reader.unreadable:  # another trainer's checkpoint may have dropped them, so there is nothing to train
            self._lease.buffer.check_epoch(self._lease.epoch)
        self._content = batch.content
        return replace(batch, prefetched=reader.prefetched, unreadable=tuple(reader.unreadable))

"""`Feed`: a training run's data loader for TRL.

Invariant: a batch is claimed when TRL asks for the first micro-batch of an update, and only after the last update has
been committed. All ranks ask at the same time, and do what rank 0 decides. Only rank 0 waits and fails.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from rollq.buffer.errors import ConfigError, ProductionStalled, ProductionStopped, SyncFirst
from rollq.consumer import Batch, Consumer, MicroBatch
from rollq.consumer.trainer.ranks import Ranks
from rollq.integrations.trl.inputs import grpo_inputs
from rollq.integrations.trl.limits import check_batch

if TYPE_CHECKING:
    from trl import GRPOConfig

log = logging.getLogger(__name__)


class Feed:
    """An iterable over the inputs of micro-batches, `gradient_accumulation_steps` per batch."""

    def __init__(
        self,
        consumer: Consumer,
        ranks: Ranks,
        args: "GRPOConfig",
        *,
        max_tokens: int,
        publish: Callable[[], None],
        can_save: Callable[[], bool],
        save: Callable[[], None],
    ) -> None:
        """`publish` publishes the current weights, and `save` saves a checkpoint: all ranks call both. `can_save`
        returns whether this step still lacks a checkpoint."""
        self._consumer = consumer
        self._ranks = ranks
        self._args = args
        self._max_tokens = max_tokens
        self._publish = publish
        self._can_save = can_save
        self._save = save
        self._claimed: Batch | None = None
        self.batch: Batch | None = None
        self.wait_s = 0.0
        self.has_ended = False
        self.error: ProductionStopped | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while (batch := self._next()) is not None:
            check_batch(batch, self._args)
            self.batch = batch
            for micro in self._micro_batches(batch):
                yield grpo_inputs(micro, self._args, batch.step)
        self.has_ended = True

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        count = self._args.gradient_accumulation_steps
        try:
            return batch.micro_batches(self._max_tokens, count=count, padded=True)
        except ConfigError as error:
            where = "count is gradient_accumulation_steps of GRPOConfig"
            raise ConfigError(f"step {batch.step}: {error}; {where}") from None

    def _next(self) -> Batch | None:
        """Return the next step's batch; None at the end. Publish or save if the batch waits for that."""
        started_s = time.monotonic()
        while True:
            match self._ranks.lead(self._ask):
                case "publish":
                    self._publish()
                case "save":
                    self._save()
                case "end":
                    return None
                case _:
                    batch = self._claimed if self._ranks.is_first else next(self._consumer, None)
                    if self._ranks.any(batch is None):
                        return None
                    self.wait_s = time.monotonic() - started_s
                    return batch

    def _ask(self) -> str:
        """Ask for the next batch, on rank 0. Returns what all ranks do next."""
        try:
            self._claimed = next(self._consumer, None)
        except SyncFirst as error:
            log.warning("%s", error)
            return "publish"
        except ProductionStalled as error:
            if not self._can_save():
                raise
            log.warning("a checkpoint may free memory: %s", error)
            return "save"
        except ProductionStopped as error:
            self.error = error
            return "end"
        return "end" if self._claimed is None else "train"

"""A sampler that gives batches of rollq to NeMo-RL's SingleController. This has not been run: see README.md."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
from nemo_rl.algorithms.async_utils.staleness_sampler import BaseSampler
from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.experience.payload import pack_payload
from rows import rows_of

from rollq.consumer import Batch, Consumer, ConsumerSettings


class RollqSampler(BaseSampler):
    """The trainer at version v takes the batch of step v + 1."""

    def __init__(
        self, buffer: TQReplayBuffer, *, url: str, run: str, model: str, weights_dir: str, checkpoints: str
    ) -> None:
        super().__init__(buffer)
        self._url, self._run, self._model = url, run, model
        self._checkpoints = checkpoints
        self._settings = ConsumerSettings(transport="path", weights_dir=Path(weights_dir))
        self._consumer: Consumer | None = None
        self._batch: Batch | None = None

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Never return: NeMo-RL has nothing to generate."""
        await asyncio.Event().wait()
        return None

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[KVBatchMeta | None, int]:
        """End the previous step, and put the rows of the next batch into the data plane. Waits until the batch is
        full."""
        self._batch = await asyncio.to_thread(self._next, current_train_weight)
        ids, fields = rows_of(self._batch)
        _, packed, tags = pack_payload(fields, weight_version=current_train_weight, group_id="rollq")
        where: dict[str, Any] = {"sample_ids": ids, "partition_id": self._buffer._partition_id}
        await self._buffer._call_dp("put_samples", fields=packed, tags=tags, **where)
        lengths = fields["input_lengths"].tolist()
        meta = KVBatchMeta(task_name="train", fields=list(fields), sequence_lengths=lengths, tags=tags, **where)
        return meta, len(self._batch.groups)

    async def evict(self, *, current_train_weight: int) -> int:
        """Do nothing: rollq delivers no stale groups."""
        return 0

    def _next(self, version: int) -> Batch:
        weights = Path(self._checkpoints.format(step=version)) if version else Path(self._model)
        if self._consumer is None:
            self._consumer = Consumer.connect(
                self._url, run=self._run, weights=weights, resume_from=version, settings=self._settings
            ).__enter__()
        elif self._batch is not None:
            self._consumer.publish(weights, step=self._batch.step)
            self._consumer.commit(self._batch)
            self._consumer.checkpoint(self._batch.step)
        batch = next(self._consumer)
        if batch.step != version + 1:
            raise ValueError(f"NeMo-RL is at version {version}, and rollq at step {batch.step}: resume both from one")
        return batch

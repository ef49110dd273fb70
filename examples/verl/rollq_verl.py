"""A sampler and a trainer with which verl 0.9.1 trains on batches of rollq. This has not been run: see README.md."""

import json
from pathlib import Path
from typing import Any

import transfer_queue as tq
from rows import rows_of
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollq.consumer import Batch, Consumer, ConsumerSettings


class RollqSampler(ReplayBuffer):
    """Takes each step's batch from a run, instead of generating it with verl."""

    consumer: Consumer
    batch: Batch

    def open(self, step: int, checkpoint: Path) -> None:
        """Connect after `step`, whose checkpoint is in this folder; 0 for none."""
        given = self.sampler_kwargs
        mark = checkpoint / "rollq.json"
        self.consumer = Consumer.connect(
            given.url,
            run=given.run,
            weights=checkpoint / "actor" / "huggingface" if step else Path(given.model),
            resume_from=step,
            lineage=json.loads(mark.read_text())["lineage"] if mark.exists() else None,
            settings=ConsumerSettings(transport="path", weights_dir=Path(given.weights_dir)),
        ).__enter__()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Put the rows of the next batch into TransferQueue. Waits until the batch is full."""
        self.batch = next(self.consumer)
        if self.batch.step != global_steps:
            raise ValueError(f"verl is at step {global_steps}, and rollq at {self.batch.step}: resume both from one")
        if len(self.batch.groups) != batch_size:
            raise ValueError(f"the batch has {len(self.batch.groups)} groups: set data.train_batch_size to that")
        keys, rows, tags = rows_of(self.batch)
        tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags)
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {"rollq/groups": len(self.batch.groups)}


@register_trainer("rollq")
class RollqTrainer(PPOTrainer):
    """verl's loop without its prompts and its rollouts: `on_step_end` comes after the checkpoint of the step."""

    replay_buffer: RollqSampler

    def on_init_end(self) -> None:
        self.replay_buffer.open(self.global_steps, self._folder())

    def prepare_step(self) -> dict[str, Any]:
        return {}  # producers submit prompts

    def on_sample_end(self) -> None:
        pass

    def on_step_end(self) -> None:
        consumer, batch = self.replay_buffer.consumer, self.replay_buffer.batch
        consumer.publish(self._folder() / "actor" / "huggingface", step=batch.step)
        consumer.commit(batch)
        (self._folder() / "rollq.json").write_text(json.dumps({"lineage": consumer.lineage}))
        consumer.checkpoint(batch.step)

    def on_train_end(self) -> None:
        self.replay_buffer.consumer.__exit__(None, None, None)

    def _folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

"""A trainer on every kind of server: two ranks, with weights that go through it."""

from contextlib import ExitStack
from pathlib import Path

from rollq.buffer.buffer import Buffer
from rollq.consumer import Consumer, ConsumerSettings
from support.any_server import AnyServer
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3


def test_two_ranks_train_and_publish_through_the_server(
    any_server: AnyServer, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        buffer = stack.enter_context(Buffer.connect(any_server.url, run_name))
        make_run(buffer, batch_groups=6)
        ranks = [
            stack.enter_context(
                Consumer.connect(
                    any_server.url,
                    run=run_name,
                    weights=model_folder,
                    settings=ConsumerSettings(
                        transport="redis", launch_id="one", rank=rank, world_size=2, timeout_s=30
                    ),
                )
            )
            for rank in range(2)
        ]
        worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
        for step in (1, 2, 3):
            worker.produce(6)
            batches = [next(rank) for rank in ranks]
            assert batches[0].group_ids == batches[1].group_ids
            assert batches[0].counts == batches[1].counts
            assert sum(len(batch.share) for batch in batches) == len(batches[0].lengths)
            for rank, batch in zip(ranks, batches, strict=True):
                rank.publish(tiny_qwen3(step + 1).state_dict(), step=batch.step)
                rank.commit(batch)
            ranks[0].checkpoint(step)
        assert buffer.clock("math").committed == 3

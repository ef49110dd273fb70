"""A model that FSDP2 has spread over two ranks is published as one process publishes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.weights.loading import load_weights
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.sources import weights_source
from support.buffer_run import World
from support.failing_ranks import fail_on_rank_0, tie_unequally
from support.forks import FORKS
from support.manual_worker import make_run
from support.sharded_publisher import publish_sharded
from support.untrained_models import make_model
from support.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize("family", ["llama tied", "gemma3_text", "qwen3_moe"])
def test_the_ranks_of_a_sharded_model_publish_the_file_of_one_process(
    family: str, server_url: str, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer)
    ranks = [
        FORKS.Process(target=publish_sharded, args=(rank, server_url, buffer.run, tmp_path, family))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    wait_until(lambda: buffer.clock("math").epoch > 0 or not all(rank.is_alive() for rank in ranks))
    World(buffer).complete(2)
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    live, model = buffer.live_model(), make_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    expected = WeightPublisher(buffer, "redis", None, 3).put(weights_source(model))
    assert live is not None
    assert (live.version, live.digest) == (1, expected.digest), "the same bytes"
    folder = load_weights(buffer, live.uri, live.digest, into=tmp_path / "worker")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is False
    assert "is sharded over ranks: publish the model itself" in (tmp_path / "refused0").read_text()
    assert not (tmp_path / "refused1").exists(), "what other ranks publish is not looked at"


@pytest.mark.parametrize("way", ["checkpoint", "publication"])
@pytest.mark.parametrize("step", ["write", "convert"])
def test_ranks_get_through_where_rank_0_fails_in_the_middle(step: str, way: str, tmp_path: Path) -> None:
    assert in_two_ranks(fail_on_rank_0, tmp_path, step, way) == [0, 0]


@pytest.mark.parametrize("sharded", [1, 2])
def test_ranks_agree_that_tied_tensors_differ(sharded: int, tmp_path: Path) -> None:
    assert in_two_ranks(tie_unequally, tmp_path, sharded) == [0, 0]


def in_two_ranks(work: Callable[..., None], *given: Any) -> list[int | None]:
    """Call `work(rank, *given)` in two processes; returns their exit codes. None: it did not end, and was ended."""
    ranks = [FORKS.Process(target=work, args=(rank, *given)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes

"""Fixtures of the tests that run a real vLLM on the CPU, in an environment of their own: `make test-vllm`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollq.workers.engines.registry import make_engine
from support.model_families import VOCABULARY
from support.vllm_run import SharedEngine, free_port, make_qwen3, options
from support.vllm_server import VllmServer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folders of one model with different weights."""
    return [make_qwen3(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in range(3)]


@pytest.fixture(scope="session")
def shared(models: list[Path]) -> Iterator[SharedEngine]:
    """An engine that was started with the first model."""
    engine = SharedEngine(lambda: make_engine("vllm", options(models[0])))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends with whatever it says first."""
    return make_qwen3(tmp_path_factory.mktemp("stopping"), 0, eos_token_id=list(range(VOCABULARY)))


@pytest.fixture(scope="session")
def servers(
    models: list[Path], stopping: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer, VllmServer]]:
    """Two of the first model, and one that stops at once."""
    log = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started = []
        for number, folder in enumerate((models[0], models[0], stopping)):
            started.append(stack.enter_context(VllmServer(folder, free_port(), log / str(number))))
        for server in started:
            server.wait()
        one, other, third = started
        yield one, other, third

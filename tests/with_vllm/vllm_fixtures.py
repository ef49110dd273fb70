"""Fixtures of the tests that run a real vLLM on the CPU, in an environment of their own: `make test-vllm`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import SharedEngine, make_qwen3, options


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folders of one model with different weights."""
    return [make_qwen3(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in range(3)]


@pytest.fixture(scope="session")
def shared(models: list[Path]) -> Iterator[SharedEngine]:
    """An engine that was started with the first model."""
    engine = SharedEngine(options(models[0]))
    yield engine
    engine.close()

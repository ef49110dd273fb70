"""What `Engine` promises, on the engines that need no server and no vLLM."""

from pathlib import Path

import pytest

from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from support.engine_contract import *  # noqa: F403 - its tests run here
from support.engine_contract import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, make_model(258, seed=0), make_tokenizer())
    return path


@pytest.fixture(scope="module")
def stopping_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends with whatever it says first."""
    path = tmp_path_factory.mktemp("stopping-model")
    model = make_model(258, seed=0)
    model.generation_config.eos_token_id = list(range(258))
    save(path, model, make_tokenizer())
    return path


@pytest.fixture(params=["transformers", "simulated", "simulated, as a GPU"])
def world(request: pytest.FixtureRequest, folder: Path, stopping_folder: Path) -> World:
    if request.param == "transformers":
        model, stopping = ({"model": path, "device": "cpu"} for path in (folder, stopping_folder))
        return World("transformers", model, folder, stopping)
    shared = {"most_tokens_per_s": 1000.0, "max_sequences": 8} if request.param == "simulated, as a GPU" else {}
    slow, short = ({"lengths": (length,), "tokens_per_s": 250.0, **shared} for length in (100_000, 3))
    return World("simulated", slow, folder, short)

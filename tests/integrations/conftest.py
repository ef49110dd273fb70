"""The model and the settings that the tests with TRL start from."""

from pathlib import Path

import pytest

from support.trl_runs import save_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))

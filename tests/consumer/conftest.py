"""The model that most tests of the consumer start from."""

from pathlib import Path

import pytest

from support.tiny_qwen3 import tiny_qwen3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(folder)
    return folder

"""Code that settings name, and mistakes in it."""

import sys
from pathlib import Path

import pytest

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.errors import ConfigError


def test_a_file_with_a_syntax_error_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_judges.py").write_text("def reward(prompt, sample):\n    return (\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"judge 'broken_judges\.reward': cannot import .*broken_judges\.py:2\)"):
        load_plugin("judge", "broken_judges.reward", {})
    assert "broken_judges" not in sys.modules

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


@pytest.mark.parametrize("line", ["1 / 0", "sys.nothing", "sys.exit(3)"])
def test_a_module_that_raises_is_named_with_the_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_judges.py").write_text(f"import sys\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot import 'raising_judges': \w+(Error|Exit): .*raising_judges\.py:2\)"):
        load_plugin("judge", "raising_judges.reward", {})


@pytest.mark.parametrize("name", ["reward", "rewards.", ".reward", "rewards..reward"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"judge '{name}': use exact, or a dotted path"):
        load_plugin("judge", name, {"exact": print})


def test_a_module_of_python_that_hides_the_own_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"module 'math' \((built into Python|.*math.*)\) has no 'reward'"):
        load_plugin("judge", "math.reward", {})

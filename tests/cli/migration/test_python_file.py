"""What is read of a Python file of settings, without running it."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.python_file import assigned
from rollq.cli.settings.migration.values import Made, Named, Placeholder, Unknown

FILE = Path("config.py")


def read(text: str) -> dict[str, Any]:
    return assigned(FILE, text)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("16 * 1024**3", 17179869184),
        ("int(os.environ.get('N', '4')) // 2", 2),
        ("float(os.getenv('RATIO', 0.5))", 0.5),
        ("os.environ.get('PARTIAL', '0') == '1'", False),
        ("os.environ.get('FLAG', 'yes').lower() in ('1', 'yes')", True),
        ("int(os.environ['STEPS']) if os.environ.get('STEPS') else None", None),
        ("f'{name}-{4 * 2}'", "run-8"),
        ("os.path.join('/data', name, 'train.jsonl')", "/data/run/train.jsonl"),
        ("Path('/data') / name", "/data/run"),
        ("dict(a=1, **{'b': 2})", {"a": 1}),
        ("{**{'a': 1}, 'b': -2}", {"a": 1, "b": -2}),
        ("[1, 2][1] + len((1, 2, 3))", 5),
        ("not (3 > 2 and name != 'run')", True),
        ("os.environ['DATA']", Placeholder("DATA")),
        ("os.environ['DATA'] + '/train.jsonl'", Placeholder("DATA/train.jsonl")),
        ("torch.bfloat16", Named("torch.bfloat16")),
        ("load(name)", Unknown("load(name)")),
        ("int(os.environ['STEPS'])", Unknown("int(os.environ['STEPS'])")),
        ("1 / 0", Unknown("1 / 0")),
        ("9**9**9", Unknown("9 ** 9 ** 9")),
        ("'a' * 10**10", Unknown("'a' * 10 ** 10")),
        ("missing", Unknown("missing")),
    ],
)
def test_an_expression_has_its_value_or_is_unknown(expression: str, value: object) -> None:
    assert read(f"import torch\nname = 'run'\nx = {expression}")["x"] == value


def test_objects_have_their_class_and_fields() -> None:
    names = read(
        "base = SampleParams(top_k=0)\nbase.top_p = 0.9\nx = rl.AgentLoopConfig(params=base, top_k=base.top_k)"
    )
    assert names["x"] == Made(
        "AgentLoopConfig", {"params": Made("SampleParams", {"top_k": 0, "top_p": 0.9}), "top_k": 0}
    )


def test_functions_of_the_file_are_followed() -> None:
    code = """
def flag(name, default=False):
    value = os.environ.get(name)
    if value is None:
        return default
    return value == "1"
x, y = flag("A", True), flag("B")
"""
    assert (read(code)["x"], read(code)["y"]) == (True, False)


def test_loops_are_followed_and_an_unknown_one_runs_once() -> None:
    code = """
known, unknown = [], []
for name in ("a", "b"):
    known.append(name)
with open("meta.json") as file:
    meta = json.load(file)
for name, entry in meta.items():
    unknown.append({"path": entry["path"], "ratio": 1.0})
"""
    names = read(code)
    assert names["known"] == ["a", "b"]
    assert names["unknown"] == [{"path": Unknown("entry['path']"), "ratio": 1.0}]


def test_of_an_unknown_branch_the_first_counts() -> None:
    assert read("if is_there():\n    x = 1\nelse:\n    x = 2\n    y = 3") == {"x": 1, "y": 3}


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    read(f"import os\nos.system('touch {made}')\nopen('{made}', 'w')\n__import__('os').mkdir('{made}')\nx = eval('1')")
    assert not made.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = (", "not Python, at line 1"),
        ("return 1", "'return' outside of a function"),
        (
            "def f(n):\n    return f(n + 1)\n\n" + "x = [" + ", ".join(["f(0)"] * 1100) + "]",
            "more than 20,000 statements",
        ),
        ("x = 1" + " + 1" * 100_000, "not Python"),
        ("x = 1" + " + 1" * 700, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(text)

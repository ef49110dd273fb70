"""What is read of a Python file of settings, without running it."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.python_file import assigned
from rollq.cli.settings.migration.values import REST, Made, Named, Placeholder, Several, Unknown

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
        ("dict(a=1, **{'b': 2})", {"a": 1, "b": 2}),
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


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("if is_there():\n    x = 1\nelse:\n    x = 2", Unknown("1 or 2")),
        ("if is_there():\n    x = 1\nelse:\n    x = 1", 1),
        ("x = 1\nif os.environ['MODE'] == 'small':\n    x = 2", Unknown("2 or 1")),
        ("if is_there():\n    x = 1\nelse:\n    raise ValueError", 1),
        ("o = Config(a=1)\nif is_there():\n    o.a = 2\nx = o.a", Unknown("2 or 1")),
        ("x = ['a']\nif is_there():\n    x.append('b')", ["a", Several("['a', 'b'] or ['a']")]),
        ("if is_there():\n    x = Config()\n    x.a = 1\nelse:\n    x = Config(a=1)", Made("Config", {"a": 1})),
        ("def f():\n    if is_there():\n        return 8\n    return 128\nx = f()", Unknown("8 or 128")),
        ("def f():\n    if is_there():\n        return 8\n    return 8\nx = f()", 8),
        ("x = 1\ndef f():\n    global x\n    if is_there():\n        return\n    x = 2\nf()", Unknown("f(...)")),
        ("x = 1\nfor i in range(3):\n    x = x * 10", 1000),
        ("for x in [8, 16, 32]:\n    if x == 16:\n        break", 16),
        ("for i in [8, 16]:\n    if is_there():\n        break\n    x = i", Unknown("for i in [8, 16]")),
        ("x = 1\nfor i in load():\n    x = x + 1", Unknown("for i in load()")),
        ("x = []\nfor i in load():\n    x.append({'a': i, 'b': 1})", [Several("for i in load()")]),
        ("x = 1\nwhile x < 64:\n    x *= 2", 64),
        ("x = 1\nwhile is_there():\n    x *= 2", Unknown("while is_there()")),
        ("x = 1\nwhile True:\n    x += 1", Unknown("while True")),
        ("try:\n    x = 1\nexcept ImportError:\n    x = 2", Unknown("1 or 2")),
        ("try:\n    raise ValueError\nexcept ValueError:\n    x = 2", 2),
        ("try:\n    import flash\nexcept ImportError:\n    pass\nfinally:\n    x = 3", 3),
        ("with suppress(ImportError):\n    x = 1", Unknown("1 or nothing")),
        ("x = 8\ndef f():\n    global x\n    x = 64\nf()", 64),
        ("def f():\n    y = 1\n    def g():\n        nonlocal y\n        y = 2\n    g()\n    return y\nx = f()", 2),
        ("b = 64\ndef f():\n    return b\ndef g():\n    b = 2\n    return f()\nx = g()", 64),
        ("def f(*, b=64, **more):\n    return b + more['c']\nx = f(c=1)", 65),
        ("def f(*a, b=1):\n    return len(a) + b\nx = f(*[1, 2], **{'b': 3})", 5),
        ("def f(b=1):\n    return b\nx = f(**load())", Unknown("b")),
        ("o = Config()\nsetattr(o, 'a', 5)\nx = o.a", 5),
        ("o = Config(a=1)\nsetattr(o, load(), 5)\nx = o", Made("Config", {REST: Unknown("set load()")})),
        ("x = {'a': 1}\nx.update({'a': 2}, b=3)", {"a": 2, "b": 3}),
        ("x = {'a': 1}\nx.update(load())", {REST: Unknown("load()")}),
        ("x = {'a': 1, **load(), 'b': 2}", {REST: Unknown("load()"), "b": 2}),
        ("x = {'a': 1, 'b': 2}\ndel x['a']", {"b": 2}),
        ("y = 1\ndel y\nx = y", Unknown("y")),
        ("y = (x := 3)", 3),
        ("match load():\n    case 1:\n        x = 1\n    case {'a': x}:\n        pass", Unknown("1 or x or nothing")),
        ("x = ['a']\nx.insert(0, 'b')", ["b", "a"]),
        ("x = ['a']\nx.insert(load(), 'b')", [Several("x.insert(load(), 'b')")]),
        ("x = [1, *(2, 3), *load()]", [1, 2, 3, Several("*load()")]),
        ("x = len([1, *load()])", Unknown("len([1, *load()])")),
        ("x = [a * 2 for a in (1, 2, 3) if a != 2]", [2, 6]),
        ("x = [a for a in load()]", [Several("load()")]),
        ("x = {k: v for k, v in {'a': 1}.items()}", {"a": 1}),
        ("x = Config(a=1, **{'b': 2})", Made("Config", {"a": 1, "b": 2})),
        ("x = Config(a=1, **load())", Made("Config", {REST: Unknown("load()"), "a": 1})),
        ("o = Config(a=[1])\nx = copy.deepcopy(o)\no.a.append(2)", Made("Config", {"a": [1]})),
        ("o = Config(a=1)\nx = o.model_copy(update={'a': 2})", Made("Config", {"a": 2})),
        ("x = Config(a=1)\npatch(x)", Made("Config", {REST: Unknown("patch(x)")})),
        ("x = Config(a=1)\nprint(x)", Made("Config", {"a": 1})),
        ("class Mine(Config):\n    a = 2\nx = Mine()", Made("Mine", {REST: Unknown("class Mine")})),
        ("import a.b as c\nx = c.Config()", Made("Config", {})),
        ("from a import Config as Other\nx = Other()", Made("Config", {})),
        ("async def f():\n    pass\nx = f()", Unknown("f()")),
        ("x = int(os.getenv('B', default='64'))", 64),
        ("os.environ['B'] = '8'\nx = int(os.environ.get('B', '64'))", 8),
    ],
)  # fmt: skip
def test_a_name_has_its_value_or_is_unknown(code: str, value: object) -> None:
    assert read(code)["x"] == value


def test_items_of_an_unknown_loop_are_alike() -> None:
    (several,) = read("x = []\nfor i in load():\n    x.append({'path': i, 'ratio': 1.0})")["x"]
    assert several.like == {"path": Unknown("i"), "ratio": 1.0}


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
            "more than 10,000 statements",
        ),
        ("x = 1" + " + 1" * 100_000, "not Python"),
        ("x = 1" + " + 1" * 700, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(text)

"""What is read of a YAML file of settings with OmegaConf's interpolations."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.values import Placeholder, Unknown
from rollq.cli.settings.migration.yaml_file import content

FILE = Path("config.yaml")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-6", 1e-6),
        ("1.0e6", 1e6),
        ("20_000", 20000),
        ("'1e-6'", "1e-6"),
        ("${oc.env:LR,5e-7}", 5e-7),
        ("${oc.env:SEED,1}", 1),
        ("${oc.env:EAGER,true}", True),
        ("${oc.env:A,${oc.env:B,inner}}", "inner"),
        ("${oc.decode:${oc.env:EAGER,true}}", True),
        ("${oc.env:MODEL}", Placeholder("MODEL")),
        ("${oc.env:ROOT}/${name}", Placeholder("ROOT/run")),
        ("${name}-seed${oc.env:SEED,1}", "run-seed1"),
        ("${nested.deep}", 3),
        ("${nested.absent}", Unknown("${nested.absent}")),
        ("${mul:2,3}", Unknown("${mul:2,3}")),
        ("[1, '${name}']", [1, "run"]),
    ],
)
def test_a_value_is_resolved(value: str, expected: object) -> None:
    assert content(FILE, f"name: run\nnested: {{deep: 3}}\nx: {value}")["x"] == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!python/object/apply:os.system [ls]", "line 1: .*tags and unusual keys are not read"),
        ("a: !mine 1", "tags and unusual keys are not read"),
        ("a: {b: 1", "not YAML"),
        ("run = 'x'\n[tasks]", "not YAML|no mapping of keys"),
        ("- 1", "no mapping of keys"),
        ("", "no mapping of keys"),
        ("a: &a [*a]", "refers to itself"),
        ("a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
         "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e]", "too large"),
    ],
)  # fmt: skip
def test_what_is_not_plain_yaml_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        content(FILE, text)


def test_without_pyyaml_the_error_names_the_extra(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {}\nbuffer: {}\nalgorithm: {}\n")
    code = f"import sys; sys.modules['yaml'] = None; from rollq.cli.main import main; main(['convert', {str(file)!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "YAML needs the package 'yaml': pip install 'rollq[convert]'" in result.stderr

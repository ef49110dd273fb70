from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError

from rollq.buffer.rules.settings import Settings
from rollq.buffer.settings_errors import explain


class Inner(Settings):
    strategy: Literal["sync", "async"] = "async"
    share: float = Field(default=0.0, ge=0)
    url: str = ""
    password: SecretStr | None = None


class Worker(Settings):
    samples_in_flight: int | None = None
    REMOVED: ClassVar[Mapping[str, str]] = {"pace": "it is 1; leave it out"}


class Outer(Settings):
    run: str
    inner: Inner = Inner()
    maybe: Inner | None = None
    worker: Worker = Worker()
    many: dict[str, Inner] = Field(default_factory=dict)
    work: int = 0


def lines(data: dict[str, Any], **origins: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, Outer, {path.replace("__", "."): name for path, name in origins.items()})


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "run: is required, but missing"),
        ({"run": "r", "ruin": 1}, "ruin: unknown key; did you mean 'run'?"),
        ({"run": "r", "inner": {"stratgy": "sync"}}, "inner.stratgy: unknown key; did you mean 'strategy'?"),
        ({"run": "r", "many": {"a": {"sharee": 1}}}, "many.a.sharee: unknown key; did you mean 'share'?"),
        ({"run": "r", "maybe": {"zzz": 1}}, "maybe.zzz: unknown key; allowed here: strategy, share, url, password"),
        ({"run": "r", "worker": {"pace": 2}}, "worker.pace: no longer a setting: it is 1; leave it out"),
        ({"run": "r", "wor": {}}, "wor: unknown key; did you mean 'worker'?"),
        ({"run": "r", "wor": 1}, "wor: unknown key; did you mean 'work'?"),
        ({"run": "r", "mayby": {}}, "mayby: unknown key; did you mean 'maybe'?"),
        ({"run": "r", "manyy": {}}, "manyy: unknown key; did you mean 'many'?"),
        ({"run": "r", "inner": {"strategy": "best"}}, "inner.strategy = 'best': must be 'sync' or 'async'"),
        ({"run": "r", "inner": {"share": -1}}, "inner.share = -1: must be greater than or equal to 0"),
        ({"run": "r", "inner": {"share": "x"}}, "inner.share = 'x': must be a number"),
        ({"run": 7}, "run = 7: must be a string in quotes"),
        ({"run": "r", "inner": 3}, "inner = 3: must be a table"),
    ],
)
def test_a_problem_is_one_line_with_key_value_and_what_is_allowed(data: dict[str, Any], line: str) -> None:
    assert lines(data) == [line]


def test_every_problem_is_told_at_once() -> None:
    assert len(lines({"run": 1, "inner": {"share": -1, "x": 2}})) == 3


def test_the_environment_variable_that_a_value_came_from_is_named() -> None:
    (line,) = lines({"run": "r", "inner": {"share": "x"}}, inner__share="ROLLQ_SHARE")
    assert line.endswith("(from ROLLQ_SHARE)")


def test_no_password_is_shown() -> None:
    found = lines({"run": "r", "inner": {"password": 12345, "url": ["redis://:12345@host"]}})
    assert "12345" not in "".join(found)
    assert "password" in "".join(found)

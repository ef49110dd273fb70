"""The tools that come with rollq."""

import pytest

from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.built_in_tools import Lookup, calculator
from rollq.workers.agents.tool_calls import CallError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("6*7", "42"),
        (" (1 + 2) * -3 ", "-9"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7//2 + 7 % 4", "6"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("0.1+0.2", "0.3"),
        ("+1.5e3", "1500"),
        ("9**1000 // 9**999", "9"),
    ],
)
def test_the_calculator_works_out_arithmetic(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "6*",
        "six",
        "abs(-1)",
        "().__class__",
        "__import__('os')",
        "[1][0]",
        "'a'*9",
        "True+1",
        "1 if 1 else 2",
        "1<2",
        "1,2",
        "x:=1",
        "1j*1j",
        "lambda: 1",
        "\0",
        "1\n2",
    ],
)
def test_the_calculator_knows_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(CallError, match="cannot work out"):
        calculator(expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "too large"),
        ("2**9999999999999", "too large"),
        ("2**-9999999999999", "too large"),
        ("10.0**400", "Numerical result out of range|too large"),
        ("1e308*10", "too large"),
        ("*".join(["2**4000"] * 2), "too large"),
        ("(-8)**0.5", "not a real number"),
        ("1/0", "division by zero"),
        ("1e999", "too large"),
        ("1" * 401, "401 characters; 400 are allowed"),
        ("(" * 399, "never closed|too many nested"),
    ],
)
def test_the_calculator_stays_small(expression: str, words: str) -> None:
    with pytest.raises(CallError, match=words):
        calculator(expression)


def test_a_deep_expression_within_the_limit_is_worked_out() -> None:
    assert calculator("-" * 398 + "1") == "1"


def test_lookup_reads_the_table_of_the_options_or_of_the_prompt() -> None:
    prompt = Prompt("x", metadata={"table": {"Ann": 31}})
    assert Lookup({"Ann": 30})("Ann", prompt) == 30
    assert Lookup()("Ann", prompt) == 31
    with pytest.raises(CallError, match="the table has no entry 'Ben'"):
        Lookup()("Ben", prompt)
    with pytest.raises(CallError, match="the table has no entry 'Ann'"):
        Lookup()("Ann", Prompt("x"))

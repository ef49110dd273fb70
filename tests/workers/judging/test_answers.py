"""What answers of rows mean to the judges that compare with them."""

from typing import Any

import pytest

from rollq.workers.judging.answers import accepted, expressions_of, numbers_of
from rollq.workers.judging.matching import match_math
from support.judge_doubles import verdicts

LONG = 147573952589676412928

JUDGED: list[tuple[str, Any, str, float]] = [
    ("last_number", 1e-05, "It is 0.00001", 1),
    ("last_number", 1e-05, "It is -5", 0),
    ("last_number", 1e-05, r"$1 \times 10^{-5}$", 1),
    ("last_number", LONG, f"It is {LONG}", 1),
    ("last_number", LONG, "It is 20", 0),
    ("last_number", LONG, f"It is {LONG + 1}", 0),
    ("last_number", "-5", "so x = −5", 1),
    ("last_number", "#### 1,234", "It is 1{,}234.", 1),
    ("last_number", [3, "4"], "It is 4", 1),
    ("last_number", 0.1, "It is 0.1", 1),
    ("last_number", "3/2", "0.5", 0),
    ("exact_match", ["Paris", "paris"], "Paris", 1),
    ("exact_match", ["Paris", "paris"], "x", 0),
    ("exact_match", 42.0, "42", 1),
    ("exact_match", 42, "42.00", 1),
    ("exact_match", True, "true", 1),
    ("exact_match", True, "1", 0),
    ("exact_match", 1, "true", 0),
    ("exact_match", {"a": 1, "b": [2.0]}, '{"b":[2],"a":1}', 1),
    ("exact_match", {"a": 1}, "x", 0),
    ("exact_match", [[1, 2]], "[1, 2]", 1),
    ("exact_match", "007", "7", 0),
    ("exact_match", LONG, str(LONG), 1),
    ("exact_match", LONG, str(LONG + 1), 0),
    ("exact_match", False, "", 0),
    ("regex", 1e-05, "ANSWER: 0.00001", 1),
    ("regex", LONG, f"ANSWER: {LONG + 1}", 0),
    ("regex", "1,000", "ANSWER: 1000", 1),
    ("regex", ["a", "b"], "ANSWER: b", 1),
    ("regex", True, "ANSWER: true", 1),
    ("regex", "a", "ANSWER: A", 0),
    ("math", 1e-05, "It is 0.00001", 1),
    ("math", 1e-05, "It is -5", 0),
    ("math", LONG, rf"\boxed{{{LONG + 1}}}", 0),
    ("math", LONG, rf"\boxed{{{LONG}}}", 1),
    ("math", 4, r"\boxed{3}, but then \boxed{4}", 1),
    ("math", 3, r"\boxed{3}, but then \boxed{4}", 0),
    ("math", 1e-7, r"\boxed{0.0000002}", 0),
    ("math", ["1/3", "x"], r"\boxed{\frac13}", 1),
    ("math", "-5", "It is −5", 1),
    ("math", 1e-05, "It is 1e-05", 1),
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in JUDGED}))
def test_each_judge_knows_what_an_answer_means(name: str) -> None:
    cases = [(text, answer, reward) for judge, answer, text, reward in JUDGED if judge == name]
    options = {"pattern": r"ANSWER: (\S+)"} if name == "regex" else {}
    found = verdicts(name, options, [(text, answer) for text, answer, _ in cases])
    assert [verdict.error for verdict in found] == [None] * len(cases)
    wrong = [case for case, verdict in zip(cases, found, strict=True) if verdict.reward != case[2]]
    assert wrong == []


@pytest.mark.parametrize("read", [accepted, numbers_of, expressions_of])
@pytest.mark.parametrize("answer", [None, []])
def test_no_judge_compares_with_nothing(read: Any, answer: Any) -> None:
    with pytest.raises(ValueError, match=r"has no answer|empty list"):
        read(answer)


@pytest.mark.parametrize(
    ("read", "answer", "message"),
    [
        (numbers_of, "none", "has no number"),
        (numbers_of, True, "has no number"),
        (numbers_of, {"a": 1}, "no number"),
        (numbers_of, "1,5", "ambiguous as a number"),
        (numbers_of, "1.234,56", "ambiguous as a number"),
        (numbers_of, [1, None], "None"),
        (expressions_of, {"a": 1}, "not an expression"),
        (expressions_of, True, "not an expression"),
        (expressions_of, " ", "empty"),
    ],
)
def test_an_answer_that_a_judge_cannot_use_is_refused(read: Any, answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(answer)


def test_judges_of_users_compare_with_the_answer_as_it_is() -> None:
    assert match_math("It is 72.", "6 * 12 = #### 72") == 1.0
    assert match_math(r"\boxed{0.5}", [1, r"\frac12"]) == 1.0
    assert match_math("It is 5", 1e-05) == 0.0

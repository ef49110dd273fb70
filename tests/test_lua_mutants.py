"""The changes that `make mutants` makes to Lua."""

import pytest

import lua_mutants

SOURCE = """\
local LIMIT = 2 -- not 3
local function f(a, b)
  if a < b then return fail('CODE', 'not %s', a + b) end
  if a and b then a = 1 end
  g(a,
    b)
  return -a
end
"""


def changed(change: tuple[int, int, str]) -> str:
    begin, end, text = change
    return SOURCE[:begin] + text + SOURCE[end:]


TOKENS = lua_mutants.tokens_of(SOURCE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 2", "LIMIT = (2 + 1)"),
        ("a < b", "a <= b"),
        ("a and b", "a or b"),
        ("a = 1", "a = (1 + 1)"),
        ("-a", "a"),
    ],
)
def test_operators_and_numbers_are_changed(before: str, after: str) -> None:
    assert SOURCE.replace(before, after) in map(changed, lua_mutants.changed_tokens(TOKENS))


def test_comments_and_error_messages_are_left_alone() -> None:
    assert len(list(lua_mutants.changed_tokens(TOKENS))) == 5


def test_conditions_are_negated() -> None:
    negated = [changed(change) for change in lua_mutants.negated_conditions(SOURCE, TOKENS)]
    assert negated == [SOURCE.replace("if a < b", "if not (a < b)"), SOURCE.replace("if a and b", "if not (a and b)")]


def test_whole_statements_are_dropped() -> None:
    dropped = [changed(change) for change in lua_mutants.dropped_statements(SOURCE, TOKENS)]
    assert dropped == [SOURCE.replace("a = 1", ""), SOURCE.replace("g(a,\n    b)", "")]


def test_every_file_that_decides_has_mutants() -> None:
    assert all(lua_mutants.mutants_of(file) for file in lua_mutants.FILES)

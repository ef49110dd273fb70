"""Changes of rules, as pure functions."""

from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.batch_sizes import groups_at, groups_through
from rollq.buffer.rules.revisions import (
    Revision,
    changed_by_file,
    changed_by_hand,
    differences,
    for_shards,
    sizes_by_weight,
)
from rollq.buffer.rules.settings import CHANGEABLE_RULES, FIXED_RULES, TaskRules

RULES = TaskRules(batch_groups=16, schedule=((10, 32),))


def sizes(rules: TaskRules, steps: int = 40) -> list[int]:
    return [groups_at(rules.batch_groups, rules.schedule, step) for step in range(1, steps + 1)]


def test_every_rule_either_changes_or_says_why_it_cannot() -> None:
    assert {*CHANGEABLE_RULES, *FIXED_RULES} == set(TaskRules.model_fields)


@pytest.mark.parametrize("name", sorted(FIXED_RULES))
def test_a_fixed_rule_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} cannot change .*: {FIXED_RULES[name]}"):
        changed_by_hand(RULES, {name: 1}, 5)


def test_values_may_be_text() -> None:
    changed = changed_by_hand(RULES, {"max_staleness": "3", "stragglers": "expire", "tail_batch_max_tries": "none"}, 5)
    assert (changed.max_staleness, changed.stragglers, changed.tail_batch_max_tries) == (3, "expire", None)
    assert changed.stale_threshold == 4


@pytest.mark.parametrize("step", [1, 5, 10, 11, 30])
def test_a_batch_size_changes_from_its_step_on_and_never_before(step: int) -> None:
    changed = changed_by_hand(RULES, {"batch_groups": 48}, step)
    before, after = sizes(RULES), sizes(changed)
    assert after[: step - 1] == before[: step - 1]
    assert after[step - 1] == 48
    assert groups_through(16, changed.schedule, step - 1) == groups_through(16, RULES.schedule, step - 1)
    if step < 10:
        assert after[9:] == before[9:], "what was scheduled for later stays"
    else:
        assert set(after[step - 1 :]) == {48}


def test_a_task_may_leave_the_batch_and_come_back() -> None:
    left = changed_by_hand(TaskRules(batch_groups=16), {"batch_groups": 0}, 5)
    back = changed_by_hand(left, {"batch_groups": 16}, 8)
    assert sizes(back, 9) == [16, 16, 16, 16, 0, 0, 0, 16, 16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": "x"}, "max_staleness: must be a whole number$"),
        ({"max_staleness": -1}, "max_staleness: must be greater than or equal to 0$"),
        ({"batch_groups": 1001}, "batch_groups: must be less than or equal to 1000$"),
        ({"stragglers": "hope"}, "stragglers: must be 'wait' or 'expire'$"),
        ({"tail_batch_trigger_size": -1, "tail_batch_max_tries": 3}, "tail_batch_max_tries needs groups"),
        ({"max_stalenes": 3}, "max_stalenes is not a rule"),
        ({"schedule": "3:4"}, "schedule is not a rule"),
    ],
)
def test_a_wrong_change_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        changed_by_hand(RULES, changes, 5)


def test_max_staleness_stays_where_tokens_are_masked_earlier() -> None:
    masked = TaskRules(batch_groups=16, max_staleness=4, max_token_staleness=1)
    with pytest.raises(ConfigError, match=r"max_staleness cannot change .* max_token_staleness = 1 is set"):
        changed_by_hand(masked, {"max_staleness": 2}, 5)


def test_an_edited_file_changes_what_was_edited_alone() -> None:
    file = TaskRules(batch_groups=16, max_staleness=1)
    run = changed_by_hand(file, {"max_staleness": 3}, 5)
    edited = TaskRules(batch_groups=24, max_staleness=1)
    changed = changed_by_file(run, file, edited, 7)
    assert changed.max_staleness == 3, "it was set by hand, and the file still has what it had"
    assert sizes(changed, 8) == [16] * 6 + [24, 24]


def test_an_edited_schedule_holds_from_the_step_on() -> None:
    edited = TaskRules(batch_groups=8, schedule=((6, 12), (20, 40)))
    changed = changed_by_file(RULES, RULES, edited, 12)
    assert sizes(changed)[:11] == sizes(RULES)[:11]
    assert sizes(changed)[11:] == sizes(edited)[11:]


def test_an_edited_file_cannot_change_what_is_fixed() -> None:
    with pytest.raises(ConfigError, match="group_size = 4, and the run has 8: it cannot change during a run"):
        changed_by_file(RULES, RULES, TaskRules(batch_groups=16, group_size=4), 5)


def test_an_edited_bound_is_refused_by_its_own_name_where_tokens_are_masked() -> None:
    masked = TaskRules(batch_groups=16, max_staleness=4, max_token_staleness=2)
    edited = TaskRules(batch_groups=16, max_staleness=2)  # the same file with max_staleness = 2, as a clock has it
    with pytest.raises(ConfigError, match=r"^max_staleness cannot change .* max_token_staleness = 2 is set"):
        changed_by_file(masked, masked, edited, 5)


def test_an_added_bound_of_tokens_is_refused_even_if_it_is_the_former_default() -> None:
    plain = TaskRules(batch_groups=16, max_staleness=4)
    edited = TaskRules(batch_groups=16, max_staleness=8, max_token_staleness=4)
    with pytest.raises(ConfigError, match=r"^max_token_staleness = 4, and the run has none: it cannot change"):
        changed_by_file(plain, plain, edited, 5)


def test_statistics_may_be_turned_on_but_not_off() -> None:
    on = changed_by_hand(RULES, {"prompt_stats": "true"}, 5)
    assert on.prompt_stats
    with pytest.raises(ConfigError, match="prompt_stats cannot be switched off"):
        changed_by_hand(on, {"prompt_stats": "false"}, 5)


def test_differences_are_shown_as_users_write_them() -> None:
    other = TaskRules(batch_groups=16, prompt_stats=True, tail_batch_max_tries=3)
    assert differences(RULES, other) == {
        "schedule": ("10:32", "none"),
        "prompt_stats": ("false", "true"),
        "tail_batch_max_tries": ("none", "3"),
    }


def test_weights_share_the_groups_of_all_tasks() -> None:
    tasks = {"math": [TaskRules(batch_groups=16), TaskRules(batch_groups=16)], "code": [TaskRules(batch_groups=32)]}
    assert sizes_by_weight(tasks, {"math": 3, "code": 1}, 5) == {"math": 48, "code": 16}
    with pytest.raises(ConfigError, match=r"the schedule of task 'math' changes the batch at step 10"):
        sizes_by_weight({"math": [RULES]}, {"math": 1}, 5)
    with pytest.raises(ConfigError, match="weight: the weights of 'math', 'code' are all 0"):
        sizes_by_weight(tasks, {"math": 0, "code": 0}, 5)


def test_shards_share_numbers_of_groups() -> None:
    assert for_shards({"batch_groups": "10", "max_staleness": "2"}, 3) == [
        {"batch_groups": 4, "max_staleness": "2"},
        {"batch_groups": 3, "max_staleness": "2"},
        {"batch_groups": 3, "max_staleness": "2"},
    ]
    with pytest.raises(ConfigError, match="batch_groups: must be a whole number"):
        for_shards({"batch_groups": "ten"}, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "nothing changed"),
        ({"max_tries": ("3", "5")}, "max_tries 3 -> 5 from step 7 on"),
        ({"schedule": ("none", "9:24")}, "batch_groups 16 -> 24 from step 9 on"),
        ({"schedule": ("9:24", "9:24,12:0")}, "batch_groups 24 -> 0 from step 12 on"),
        (
            {"schedule": ("20:32", "9:24,20:48,30:32")},
            "batch_groups 16 -> 24 from step 9 on, batch_groups 32 -> 48 from step 20 on, as before from step 30 on",
        ),
        (
            {"max_tries": ("3", "5"), "weight": ("1.0", "2.5"), "schedule": ("none", "9:24")},
            "max_tries 3 -> 5 from step 7 on; weight 1.0 -> 2.5, batch_groups 16 -> 24 from step 9 on",
        ),
        ({"weight": ("1", "0")}, "weight 1 -> 0 from step 7 on"),
    ],
)
def test_a_revision_has_the_names_that_users_write(changes: dict[str, tuple[str, str]], text: str) -> None:
    assert Revision(2, 7, 0.0, "host:1", changes, first_groups=16).text == f"revision 2: {text}"


def test_a_batch_that_a_weight_of_another_task_shared_anew_says_so() -> None:
    revision = Revision(2, 7, 0.0, "host:1", {"schedule": ("none", "9:24")}, {"math": 24, "code": 8}, 16)
    assert revision.text == "revision 2: batch_groups 16 -> 24 from step 9 on (shared by weight)"

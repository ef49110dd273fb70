import pytest

from rollq.buffer.rules.codec import decode_rules, encode_rules
from rollq.buffer.rules.settings import TaskRules

EVERY_RULE = TaskRules(
    batch_groups=12,
    group_size=4,
    max_staleness=3,
    sync_weights_interval=2,
    order="arrival",
    priority_decay=0.25,
    expiry="group",
    kind="eval",
    schedule=((1, 8), (10, 16)),
    tail_batch_trigger_size=5,
    tail_batch_max_tries=7,
    stragglers="expire",
    max_token_staleness=1,
    max_uses=2,
    reuse_cooldown_steps=3,
    keep_window=100,
    prompt_stats=True,
    pass_reward=0.75,
    partial_rollout=True,
    min_valid_samples=3,
    max_tries=5,
    max_deaths=4,
    lease_s=12.345,
    audit_groups=50,
    max_uncheckpointed_steps=20,
    resume="fresh",
)


def test_the_fields_of_a_clock_are_the_ones_that_earlier_runs_have() -> None:
    assert encode_rules(EVERY_RULE) == {
        "threshold": "8", "batch_groups": "12", "group_size": "4", "max_staleness": "3", "sync_interval": "2",
        "order": "arrival", "expiry": "group", "kind": "eval", "schedule": "1:8,10:16", "expired": "reroll",
        "tail_batch_trigger": "5", "interruptions": "7", "stragglers": "expire", "token_staleness": "1",
        "token_shift": "-4", "max_uses": "2", "cooldown": "3", "keep_window": "100", "prompt_stats": "1",
        "pass_reward": "0.75", "partial": "1", "min_valid": "3", "max_tries": "5", "max_deaths": "4",
        "lease_ms": "12345", "audit": "50", "max_uncheckpointed": "20", "resume": "fresh", "weight": "1.0",
        "archive": "0", "offline": "0", "priority_decay": "0.25",
    }  # fmt: skip


def test_rules_come_back_from_a_clock_as_they_were() -> None:
    assert decode_rules(encode_rules(EVERY_RULE)) == EVERY_RULE


@pytest.mark.parametrize("trigger", [0, -1])
def test_defaults_come_back_as_the_values_that_they_stand_for(trigger: int) -> None:
    rules = TaskRules(batch_groups=12, tail_batch_trigger_size=trigger)
    assert decode_rules(encode_rules(rules)) == rules.model_copy(update={"min_valid_samples": rules.group_size})
    assert encode_rules(rules)["expired"] == ("drop" if trigger < 0 else "reroll")
    assert encode_rules(rules)["interruptions"] == str(2**31 - 1)

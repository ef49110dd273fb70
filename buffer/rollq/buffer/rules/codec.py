"""Encodes a task's rules as fields of its clock, and decodes them.

Every field of `TaskRules` becomes a clock field with the same name and `str` of its value, unless a table below says
otherwise. The Redis functions also read fields that are derived from the rules, which are never decoded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollq.buffer.rules.settings import TaskRules

_NEVER = 2**31 - 1
"""More interruptions than any group has."""

_RENAMED: Mapping[str, str] = {
    "audit_groups": "audit",
    "lease_s": "lease_ms",
    "max_token_staleness": "token_staleness",
    "max_uncheckpointed_steps": "max_uncheckpointed",
    "min_valid_samples": "min_valid",
    "partial_rollout": "partial",
    "reuse_cooldown_steps": "cooldown",
    "sync_weights_interval": "sync_interval",
    "tail_batch_max_tries": "interruptions",
    "tail_batch_trigger_size": "tail_batch_trigger",
}

_ENCODED: Mapping[str, Callable[[TaskRules], object]] = {
    "archive": lambda rules: int(rules.archive),
    "lease_s": lambda rules: round(rules.lease_s * 1000),
    "max_token_staleness": lambda rules: _default(rules.max_token_staleness, rules.max_staleness),
    "min_valid_samples": lambda rules: _default(rules.min_valid_samples, rules.group_size),
    "offline": lambda rules: int(rules.offline),
    "partial_rollout": lambda rules: int(rules.partial_rollout),
    "prompt_stats": lambda rules: int(rules.prompt_stats),
    "schedule": lambda rules: ",".join(f"{step}:{groups}" for step, groups in rules.schedule),
    "tail_batch_max_tries": lambda rules: _default(rules.tail_batch_max_tries, _NEVER),
}

_DECODED: Mapping[str, Callable[[str], object]] = {
    "lease_s": lambda text: int(text) / 1000,
    "schedule": lambda text: [entry.split(":") for entry in text.split(",") if entry],
    "tail_batch_max_tries": lambda text: None if int(text) == _NEVER else int(text),
}

_DERIVED: Mapping[str, Callable[[TaskRules], object]] = {
    "threshold": lambda rules: rules.stale_threshold,
    "token_shift": lambda rules: rules.token_threshold - rules.stale_threshold,
    "expired": lambda rules: "drop" if rules.tail_batch_trigger_size < 0 else "reroll",
}


def encode_rules(rules: TaskRules) -> dict[str, str]:
    """Encode a task's rules as clock fields: every field of `TaskRules`, and the fields derived from them."""
    own = {_RENAMED.get(name, name): str(_encode(name, rules)) for name in TaskRules.model_fields}
    return own | {name: str(derive(rules)) for name, derive in _DERIVED.items()}


def fields_of(names: Iterable[str]) -> list[str]:
    """The clock fields that change with these rules: the rules' own fields, derived fields, and a default that depends
    on them."""
    return [*(_RENAMED.get(name, name) for name in names), *_DERIVED, _RENAMED["max_token_staleness"]]


def decode_rules(clock: Mapping[str, str]) -> TaskRules:
    """Decode the rules that `encode_rules` wrote to a clock; a rule unknown to an older rollq gets its default.

    `min_valid_samples` is returned as the number in effect, and `max_token_staleness` as None when it masks nothing.
    """
    fields = {name: _RENAMED.get(name, name) for name in TaskRules.model_fields}
    texts = {name: clock[field] for name, field in fields.items() if field in clock}
    if texts["max_token_staleness"] == texts["max_staleness"]:
        del texts["max_token_staleness"]
    return TaskRules.model_validate({name: _DECODED.get(name, str)(text) for name, text in texts.items()})


def _encode(name: str, rules: TaskRules) -> object:
    return _ENCODED[name](rules) if name in _ENCODED else getattr(rules, name)


def _default(value: Any, default: int) -> Any:
    return default if value is None else value

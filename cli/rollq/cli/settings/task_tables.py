"""A task's tables in `rollq.toml`: the keys that every task sets, and below them a table for each other subject.

The file's tables become one flat table, which the roles' models check. `place_of` maps a key back to its place in the
file, for errors. Pure.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from rollq.buffer.store.redis_url import mask_url

MAIN: Final = (
    "prompts", "judge", "judge_options", "agent_loop", "agent_options", "batch_groups", "group_size", "profile",
    "max_staleness", "max_tokens", "temperature", "filters", "offline", "env", "env_options", "env_split", "env_shared",
)  # fmt: skip
"""The keys of `[tasks.NAME]` and `[evaluations.NAME]`."""

_TABLES: Final = ("judge_options", "agent_options", "env_options")
"""The keys among them whose values are tables."""

SUBTABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "rows": (
        "prompt_field", "answer_field", "ids_field", "images_field", "image_folders", "image_options",
        "metadata_fields", "chat", "template_options", "system_prompt", "system_prompt_field", "tools_field",
        "reply_prefix", "final_answer", "max_prompt_tokens", "max_bad_rows", "on_prompts_changed",
    ),
    "judging": (
        "group_judge", "isolate_judge", "answer_text", "on_judge_error", "scorers", "overlong_buffer_tokens",
        "overlong_penalty",
    ),
    "sampling": (
        "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "min_p", "min_tokens", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "guided_json", "guided_regex",
    ),
    "staleness": (
        "sync_weights_interval", "max_token_staleness", "stragglers", "expiry", "tail_batch_trigger_size",
        "tail_batch_max_tries", "partial_rollout",
    ),
    "batches": (
        "order", "weight", "schedule", "max_uses", "priority_decay", "reuse_cooldown_steps", "max_uncheckpointed_steps",
        "resume", "shards",
    ),
    "curriculum": (
        "prompt_order", "passes", "low", "high", "pass_reward",
    ),
    "limits": (
        "max_tries", "max_deaths", "lease_s", "audit_groups", "min_valid_samples", "min_keep_rate",
        "stop_after_failures", "should_continue", "spread",
    ),
}  # fmt: skip
"""Table below a task -> its keys."""

REMOVED: Final = {
    "archive": "all tasks are archived if [archive] has a url; leave it out",
    "curriculum_retry_passes": "prompts that were left out are tried again after 5 passes; leave it out",
    "curriculum_tries": "a pass rate counts from the first try on; leave it out",
    "inline_image_bytes": "rows may hold images up to 1 MiB; leave it out",
    "keep_window": "the keep rate is measured over 256 groups; leave it out",
    "kind": "what is evaluated belongs in [evaluations.NAME]; leave it out",
    "overlong_filter": 'set filters = ["overlong"]',
    "prompt_stats": "orders that use statistics, such as curriculum, keep them; leave it out",
    "shuffle_seed": "the order follows seed, before the first table; leave it out",
}
"""Key that has become a constant or has another name -> the remedy."""

_FIELDS: Final = {("curriculum", "low"): "curriculum_low", ("curriculum", "high"): "curriculum_high"}
"""Table and key -> the field of the models, if its name differs."""
_PLACES: Final = {_FIELDS.get((table, key), key): (table, key) for table, keys in SUBTABLES.items() for key in keys}
"""Field of the models -> its table and key in the file."""
_ROOTS: Final = ("tasks", "evaluations")


def field_of(table: str, key: str) -> str:
    """The models' field that a key sets in a table below a task."""
    return _FIELDS.get((table, key), key)


def place_of(key: str) -> str:
    """A task field's name in the file: `top_p` is `sampling.top_p`."""
    return ".".join(_PLACES.get(key, (key,)))


def place_in_file(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The file's place for a location in the models: `tasks`, `math`, `sampling`, `top_p`."""
    if len(location) > 2 and location[0] in _ROOTS and location[2] in _PLACES:
        return (*location[:2], *_PLACES[str(location[2])], *location[3:])
    return location


def flattened(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The content of `rollq.toml` with one flat table for each task and evaluation.

    Also returns a line for each key there that is in the wrong table or does not exist.
    """
    problems: list[str] = []
    flat = dict(data)
    for root in _ROOTS:
        if isinstance(tables := data.get(root), dict):
            flat[root] = {
                name: _flat(f"{root}.{name}", table, problems) if isinstance(table, dict) else table
                for name, table in tables.items()
            }
    return flat, problems


def _flat(path: str, table: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key not in SUBTABLES:
            flat[key] = value
            problems += _misplaced(path, "", key, value, MAIN)
        elif isinstance(value, dict):
            flat |= {field_of(key, inner): item for inner, item in value.items()}
            for inner, item in value.items():
                problems += _misplaced(path, key, inner, item, SUBTABLES[key])
        else:
            problems.append(f"{path}.{key} = {mask_url(repr(value))}: must be a table")
    return flat


def _misplaced(path: str, table: str, key: str, value: Any, allowed: Collection[str]) -> Iterator[str]:
    """The problem of a key in this table, if there is one."""
    if key in allowed:
        return
    here = f"{path}.{table}" if table else path
    if key in _PLACES:
        yield f"{here}.{key}: write it as {place_of(key)}, or put it under [{path}.{_PLACES[key][0]}]"
    elif key in REMOVED:
        yield f"{here}.{key}: no longer a setting: {REMOVED[key]}"
    elif key in MAIN:
        yield f"{here}.{key}: belongs directly in [{path}]"
    elif close := _close(key, value):
        yield f"{here}.{key}: unknown key; did you mean {place_of(close)!r}?"
    else:
        tables = "" if table else f", and the tables {', '.join(SUBTABLES)}"
        yield f"{here}.{key}: unknown key; allowed here: {', '.join(allowed)}{tables}"


def _close(key: str, value: Any) -> str | None:
    """The table or field with the name that `key` may be meant for. A table's key is rather meant for a table."""
    tables = [*SUBTABLES, *_TABLES]
    known = ([tables] if isinstance(value, dict) else []) + [[*MAIN, *_PLACES, *SUBTABLES]]
    return next((close for names in known for close in difflib.get_close_matches(key, names, n=1)), None)

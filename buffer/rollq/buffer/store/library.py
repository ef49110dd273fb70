"""Assembles the source of the Redis function library from the files in `lua/`.

The source begins with constants that Python and Lua share, so that each has one definition, in Python. Then come the
files in `lua/common/`, whose names every function can use, and one block per function, whose names only it can use.

The source's digest is part of the library's name and every function's name, so that several releases can work side by
side on one server, and in one run.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from rollq.buffer.rules.codec import fields_of
from rollq.buffer.rules.settings import CHANGEABLE_RULES
from rollq.buffer.store.pubsub import EventKind
from rollq.buffer.store.scores import ARRIVALS, NO_TOKENS
from rollq.buffer.values.curves import MOST_ROW_BYTES
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.history import HISTORY_COUNTERS, HISTORY_ROW_MS, HISTORY_ROWS
from rollq.buffer.values.rollouts import (
    AWAY,
    BESIDE,
    MOST_ERROR_BYTES,
    MOST_PART_BYTES,
    MOST_PARTS,
    SCHEDULED,
    WHOLE,
    SampleStatus,
    Status,
)
from rollq.buffer.values.step_rows import FULL_ROWS, THINNED_ROWS

COMMON = (
    "basics",
    "arguments",
    "levels",
    "access",
    "clock",
    "samples",
    "orders",
    "groups",
    "deaths",
    "leases",
    "loans",
    "parts",
    "batches",
    "steps",
    "plans",
    "weights",
    "restoring",
)
"""The files in `lua/common/`, ordered so that each uses only names from earlier files."""
KINDS = ("run", "task", "group", "step", "batch", "payload", "snapshot", "archive")
"""The folders in `lua/` with one file per function."""

READ_ONLY = frozenset({"counts", "find", "inspect", "overview", "preview", "readiness", "save_group", "save_index"})
REFUSED_WHEN_FULL = frozenset({"admit", "fill_batch", "insert", "restore_groups", "salvage"})
"""Functions that a server refuses while its memory is full. All others run, so that the server can drain."""
TAKE_PAYLOADS = frozenset({"put", "restore_groups"})
"""Functions whose calls come with payloads, which are set in the same transaction."""


@cache
def digest() -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the library's source, without digests in its names."""
    return hashlib.sha256(_source("rollq").encode()).hexdigest()[:12]


def is_digest(text: str) -> bool:
    """Whether `text` may be a release's digest."""
    return re.fullmatch("[0-9a-f]{12}", text) is not None


def library_name() -> str:
    """The library's name on a server."""
    return f"rollq_{digest()}"


def connection_name(library: str) -> str:
    """The name for connections of roles that use a library. By this name, `rollq doctor` finds the libraries in use."""
    return library.replace("_", "-")


def function_name(name: str, release: str | None = None) -> str:
    """The name on a server of the function `name` from this release, or from the release with the digest `release`."""
    return f"rollq_{release or digest()}_{name}"


@cache
def library_source() -> str:
    """The Lua source of the whole library."""
    return _source(library_name())


def _source(library: str) -> str:
    common = [(_folder() / "common" / f"{name}.lua").read_text() for name in COMMON]
    blocks = [_block(library, name, source) for name, source in function_sources().items()]
    return "\n".join([f"#!lua name={library}", constants(), *common, *blocks])


def function_sources() -> dict[str, str]:
    """The Lua source of each function, by name, in order."""
    files = [path for kind in KINDS for path in (_folder() / kind).iterdir()]
    return dict(sorted((path.name.removesuffix(".lua"), path.read_text()) for path in files))


def _folder() -> Traversable:
    return resources.files("rollq.buffer") / "lua"


def constants() -> str:
    """The constants that Lua takes from Python, in Lua source."""
    by_step = f"{{ full = {FULL_ROWS}, thinned = {THINNED_ROWS}, bytes = {MOST_ROW_BYTES} }}"
    letters = ", ".join(f"{status.name.lower()} = '{status.value}'" for status in SampleStatus)
    lines = {
        "ARRIVALS": str(ARRIVALS),
        "NO_TOKENS": str(NO_TOKENS),
        "WHOLE": f"'{WHOLE}'",
        "BESIDE": f"'{BESIDE}'",
        "AWAY": f"'{AWAY}'",
        "MOST_ERROR_BYTES": str(MOST_ERROR_BYTES),
        "MOST_PARTS": str(MOST_PARTS),
        "MOST_PART_BYTES": str(MOST_PART_BYTES),
        "STATUSES": _lua_list(Status),
        "SCHEDULED": _lua_list(SCHEDULED),
        "SAMPLE": f"{{ {letters}, failures = {_lua_list(FailureKind)} }}",
        "MAY_CHANGE": _lua_table((name, "1") for name in fields_of(CHANGEABLE_RULES)),
        "HISTORY": (
            f"{{ row_ms = {HISTORY_ROW_MS}, rows = {HISTORY_ROWS}, counters = {_lua_list(HISTORY_COUNTERS)}, "
            f"by_step = {by_step} }}"
        ),
        "EVENT": _lua_table((kind.value, kind.value) for kind in EventKind),
    }
    return "".join(f"local {name} = {value}\n" for name, value in lines.items())


def _lua_list(words: Iterable[str]) -> str:
    return "{\n" + "".join(f"  '{word}',\n" for word in words) + "}"


def _lua_table(items: Iterable[tuple[str, str]]) -> str:
    return "{\n" + "".join(f"  {name} = '{value}',\n" for name, value in items) + "}"


def _block(library: str, name: str, source: str) -> str:
    flags = [] if name in REFUSED_WHEN_FULL else ["'allow-oom'"]
    callback = f"with_payloads({name})" if name in TAKE_PAYLOADS else name
    if name in READ_ONLY:
        flags = ["'no-writes'"]
    else:
        callback = f"with_all_keys({callback})"
    return (
        f"do\n{source}redis.register_function({{\n  function_name = '{library}_{name}',\n  callback = {callback},\n"
        f"  flags = {{ {', '.join(flags)} }},\n}})\nend"
    )

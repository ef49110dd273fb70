"""Bugs that are put into the functions on purpose: the suite proves something only if it notices each of them."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from rollq.buffer.store import library, redis_functions
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.buffer_machine import run_machine
from support.late_copies import RecordingBuffer, check_copies

EXAMPLES = 200
"""Sequences of moves in which the model must notice a bug."""


def by_model(server: EmbeddedServer, folder: Path) -> None:
    """Any sequence of moves against the plain model."""
    run_machine(server.url, examples=EXAMPLES)


def by_copies(server: EmbeddedServer, folder: Path) -> None:
    """Copies of all calls after all later moves."""
    with RecordingBuffer.connect(server.url, f"copies-{uuid.uuid4().hex[:12]}") as buffer:
        check_copies(buffer, folder)


class Bug(NamedTuple):
    """`wrong` takes the place of `right` in the source of the functions; `noticed` is the test that fails then."""

    name: str
    right: str
    wrong: str
    noticed: Callable[[EmbeddedServer, Path], None]


BUGS = (
    Bug(
        "a result is filed without its lease",
        "if group.attempt == result.attempt and group.nonce == result.nonce then",
        "if group.attempt then",
        by_model,
    ),
    Bug(
        "tokens are salvaged without their lease",
        "local is_mine = live_attempt == attempt and (",
        "local is_mine = true or (",
        by_model,
    ),
    Bug(
        "a late offer lends a sample that its worker makes",
        "  if tonumber(number) == tonumber(calls or '0') and added .. taken_back ~= '' then\n",
        "  if added .. taken_back ~= '' then\n",
        by_copies,
    ),
    Bug(
        "a sample is lent to two workers",
        "  loans.write_offered(clock, id, left)\n  return #taken\n",
        "  return #taken\n",
        by_model,
    ),
    Bug("a step is committed twice", "  if step <= clock.committed then return 0 end\n", "", by_copies),
    Bug(
        "a batch is filled with stale groups",
        "local lowest, old = stale_bound(stale_version(clock, step)), 0",
        "local lowest, old = '-inf', 0",
        by_model,
    ),
    Bug("a late release frees the next batch", "  if claimed_round > up_to_round then return 0 end\n", "", by_copies),
    Bug(
        "a late claim takes a released batch",
        "  if claim_round <= given_up then return { 'given_up', 0, 0, 0 } end\n",
        "",
        by_copies,
    ),
    Bug(
        "a launch that was replaced takes the run back",
        "  if not redis.call('ZSCORE', launches, launch_id) then return nil end\n",
        "  do return nil end\n",
        by_model,
    ),
    Bug(
        "tokens stay as young as before a rewind",
        "floors = floors,",
        "floors = clock.floors,",
        by_model,
    ),
    Bug(
        "a lease that never arrived counts as a death",
        "  if confirmed then\n    deaths =",
        "  if true then\n    deaths =",
        by_model,
    ),
    Bug(
        "a late call reopens an evaluation",
        "  if redis.call('EXISTS', batch_key(clock, handle)) == 1 then return { handle, 0 } end\n",
        "",
        by_copies,
    ),
    Bug(
        "a late pause undoes a resume",
        "  if clock.control_revision ~= tonumber(revision) then return -1 end\n",
        "",
        by_copies,
    ),
    Bug(
        "inserted groups of a batch that is regenerated wait to be sampled",
        "  if mode == 'return' or clock.offline == 1 then",
        "  if mode == 'return' then",
        by_model,
    ),
    Bug(
        "a restored result is filed without its place in the version index",
        "  elseif status == 'completed' or status == 'aborted' then\n    file_result(task,",
        "  elseif false then\n    file_result(task,",
        by_model,
    ),
    Bug(
        "a call from before a restore changes the restored run",
        "  if values.incarnation ~= incarnation then return nil, store_lost(key, values.incarnation) end\n",
        "",
        by_copies,
    ),
    Bug(
        "a late copy of a restore writes into the restored run",
        "  if existing == incarnation then return false end\n",
        "  if existing == incarnation then return true end\n",
        by_copies,
    ),
    Bug(
        "a checkpoint drops more than it covers",
        "redis.call('ZRANGEBYSCORE', archived, '-inf', step,",
        "redis.call('ZRANGEBYSCORE', archived, '-inf', '+inf',",
        by_model,
    ),
    Bug(
        "a clock that another server wrote goes unnoticed",
        "values.revision ~= redis.call('HGET', key, 'revision')",
        "false",
        by_model,
    ),
    Bug(
        "a result is filed without its place in the version index",
        "  call_many('ZADD', prefix .. 'by_version', totals.by_version)\n",
        "",
        by_model,
    ),
)


def is_noticed(bug: Bug, folder: Path) -> bool:
    """Whether the test for a bug fails when the functions have it. Raises ValueError when its place is gone."""
    source = library.library_source()
    if bug.right not in source:
        raise ValueError(f"{bug.name}: the functions no longer contain {bug.right!r}")
    broken = source.replace(bug.right, bug.wrong)
    with (
        mock.patch.object(redis_functions, "library_source", return_value=broken),
        EmbeddedServer(folder / "server") as server,
    ):
        try:
            bug.noticed(server, folder)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  # whatever it breaks, it is noticed
            return True
    return False

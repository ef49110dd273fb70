"""The other end of `rollq.workers.judging.process_pool`: a process that runs one call after another.

A call comes through standard input: `HEAD`, then JSON and bytes. Two answers go through standard output, each preceded
by its length: an empty answer when the function starts, then JSON with a reward, a credit or an error. Judges' output
goes to standard error. Invariant: the process ends with its parent, however the parent ends. Linux kills it, even in
the middle of a call; on other systems, it ends after the call, when its input ends.
"""

import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

import orjson

from rollq.buffer.common import exact_json
from rollq.buffer.common.child_processes import die_with_parent
from rollq.buffer.values.failures import SampleFailed
from rollq.workers.judging.environment import limit_memory, most_memory
from rollq.workers.judging.rewards import Answer, Credit, check_reward, plain_credit, plain_verdict
from rollq.workers.user_code.errors import reason_of, said_by, shown

HEAD = struct.Struct(">II")
"""The lengths in bytes of the JSON (module, function, arguments) and of the last argument, if that holds bytes."""
LENGTH = struct.Struct(">I")
MAX_TRACE = 20_000
"""The most characters of a traceback that the log shows."""


class Call(NamedTuple):
    """A function call. `before` has the module, name and arguments of a function to call first, whose result is
    ignored."""

    module: str
    name: str
    args: list[Any]
    timeout_s: float
    before: tuple[str, str, list[Any]] | None


def serve() -> None:
    """Answer calls until the input ends."""
    calls, answers = take_pipes()
    limit_memory()
    os.register_at_fork(after_in_child=partial(_let_go, calls.fileno(), answers.fileno()))
    with suppress(BrokenPipeError):  # the parent died
        for call in incoming(calls):
            _answer(call, answers)
    os._exit(0)  # without waiting for threads that a judge left


def _answer(call: Call, answers: BinaryIO) -> None:
    try:
        function = made_ready(call)
    except BaseException as error:  # noqa: BLE001 - any error in a judge, even SystemExit, fails only its sample
        write_frame(answers, failure(error, _half()))
    else:
        write_frame(answers, b"")
        write_frame(answers, outcome(function, call.args, _half()))


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the input with calls and the output for answers, moved so that nothing else in this process finds them.
    Make this process end with its parent."""
    die_with_parent(signal.SIGKILL, os.getppid())  # a parent that has already ended has closed the input
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole process tree: the parent decides when to end
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited by a judge's child processes
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return calls, answers


def incoming(calls: BinaryIO) -> Iterator[Call]:
    """The calls, until the parent closes the input."""
    with suppress(struct.error, ValueError):  # the parent died during a write
        while head := calls.read(HEAD.size):
            json_bytes, blob_bytes = HEAD.unpack(head)
            call, blob = Call(*exact_json.loads(calls.read(json_bytes))), calls.read(blob_bytes)
            yield call._replace(args=[*call.args, blob]) if blob else call


def made_ready(call: Call) -> Callable[..., Answer]:
    """The function of a call, after `before` has run."""
    function: Callable[..., Answer] = getattr(import_module(call.module), call.name)
    if call.before:
        module, name, args = call.before
        getattr(import_module(module), name)(*args)
    return function


def _half() -> str:
    return f"half of the memory, {most_memory() >> 20} MiB"


def outcome(function: Callable[..., Answer], args: list[Any], memory: str) -> bytes:
    """Call a function, and return its result or error as JSON. `memory` is its memory limit, as text."""
    try:
        answer = function(*args)
    except BaseException as error:  # noqa: BLE001 - any error in a judge, even SystemExit, fails only its sample
        return failure(error, memory)
    try:
        if isinstance(answer, Credit):
            return orjson.dumps(plain_credit(answer))
        return orjson.dumps({"reward": plain_verdict(check_reward(answer))})
    except Exception as error:  # noqa: BLE001 - the answer may be any object
        return failure(error, memory, raised=False)


def failure(error: BaseException, memory: str, *, raised: bool = True) -> bytes:
    """An error as JSON. `raised` is true if the judge itself raised it. `memory` is the judge's memory limit, as
    text."""
    trace = shown(traceback.format_exc(), MAX_TRACE)
    if isinstance(error, SampleFailed):
        return orjson.dumps({"error": said_by(error), "trace": trace, "kind": error.kind})
    reason = reason_of(error)
    if isinstance(error, MemoryError):
        reason += f": a judge may use {memory}; use a judge server for more"
    return orjson.dumps({"error": reason, "trace": trace, "raised": raised})


def how_it_ended(code: int) -> str:
    """A description of how a process ended. `code` is its exit code, or minus the number of the signal that killed
    it."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def write_frame(answers: BinaryIO, data: bytes) -> None:
    """Send an answer, preceded by its length."""
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()


def _let_go(*pipes: int) -> None:
    """Close the pipes in processes that a judge forks. Open copies would hide this process's end from the parent."""
    for pipe in pipes:
        os.dup2(0, pipe, inheritable=False)

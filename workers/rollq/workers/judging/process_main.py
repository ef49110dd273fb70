"""The other end of `rollq.workers.judging.process_pool`: a process that runs one call after the other.

A call comes through the standard input: `HEAD`, then JSON and bytes. Two answers go through the standard output, each
with its length before it: an empty one when the function starts, then JSON with a reward, a credit or an error. Output
of judges goes to the standard error. Invariant: the process ends with its parent, however the parent ends: Linux kills
it, even in the middle of a call; elsewhere it ends after the call, with its input.
"""

import os
import signal
import struct
import sys
import traceback
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO

import orjson

from rollq.buffer.common import exact_json
from rollq.buffer.common.child_processes import die_with_parent
from rollq.workers.judging.environment import limit_memory, most_memory
from rollq.workers.judging.rewards import Credit, check_reward, plain_credit, plain_verdict
from rollq.workers.user_code.errors import reason_of, shown

HEAD = struct.Struct(">II")
"""Bytes of JSON (module, function, arguments), and of the last argument, if it is bytes."""
LENGTH = struct.Struct(">I")
MAX_TRACE = 20_000
"""Characters of a traceback that reach the log."""


def serve() -> None:
    """Answer calls until the input ends."""
    die_with_parent(signal.SIGKILL, os.getppid())  # a parent that has ended already has closed the input
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole process tree: the parent decides when to end
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited by what a judge starts
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    limit_memory()
    os.register_at_fork(after_in_child=partial(_let_go, calls.fileno(), answers.fileno()))
    try:
        while head := calls.read(HEAD.size):
            json_bytes, blob_bytes = HEAD.unpack(head)
            (module, name, args), blob = exact_json.loads(calls.read(json_bytes)), calls.read(blob_bytes)
            _write(answers, _answer(answers, module, name, [*args, blob] if blob else args))
    except (BrokenPipeError, struct.error, ValueError):  # the parent died while it wrote
        pass
    os._exit(0)  # threads that a judge left do not matter


def _let_go(*pipes: int) -> None:
    """Close the pipes in processes that a judge forks: their end is how the parent notices the end of this process."""
    for pipe in pipes:
        os.dup2(0, pipe, inheritable=False)


def _answer(answers: BinaryIO, module: str, name: str, args: list[Any]) -> bytes:
    try:
        function = getattr(import_module(module), name)
        _write(answers, b"")
        answer = function(*args)
    except BrokenPipeError:
        raise
    except BaseException as error:  # noqa: BLE001 - any error in a judge, even SystemExit, fails only its sample
        return _failure(error, raised=True)
    try:
        if isinstance(answer, Credit):
            return orjson.dumps(plain_credit(answer))
        return orjson.dumps({"reward": plain_verdict(check_reward(answer))})
    except Exception as error:  # noqa: BLE001 - the answer may be any object
        return _failure(error, raised=False)


def _failure(error: BaseException, *, raised: bool) -> bytes:
    trace = shown(traceback.format_exc(), MAX_TRACE)
    reason = reason_of(error)
    if isinstance(error, MemoryError):
        reason += f": a judge may use half of the memory, {most_memory() >> 20} MiB; use a judge server for more"
    return orjson.dumps({"error": reason, "trace": trace, "raised": raised})


def _write(answers: BinaryIO, data: bytes) -> None:
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()

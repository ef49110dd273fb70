"""A sealed process of `rollq.workers.judging.process_pool`. It forks a process for each call.

It imports modules and hides files, but runs nothing that a model wrote. The fork computes and ends, so calls
cannot affect each other. `rollq.buffer.common.sealing` seals both. Calls and answers have the same format as in
`process_main`.
"""

import gc
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, Never

import orjson

from rollq.buffer.common.child_processes import die_with_parent
from rollq.buffer.common.sealing.process import Means, address_space, allow_only_computing_with, hide_files
from rollq.workers.judging.process_main import (
    Call,
    failure,
    how_it_ended,
    incoming,
    made_ready,
    outcome,
    take_pipes,
    write_frame,
)
from rollq.workers.judging.rewards import Answer

MOST_MEMORY: Final = 1 << 30
"""The most memory, in bytes, that a call may use beyond the imports' memory."""
_WORDS: Final = f"{MOST_MEMORY >> 20} MiB"
MAX_ANSWER: Final = 1 << 25
"""The most bytes in an answer: a reward for each token, and an `extra`."""
LOOK_S: Final = 0.01
"""The seconds between checks of a process that has closed its output."""


def serve(modules: Sequence[str], means: Sequence[str]) -> None:
    """Import `modules`, hide files by one of `means`, then answer calls until the input ends."""
    parent = os.getppid()
    calls, answers = take_pipes()
    silence = os.open(os.devnull, os.O_WRONLY)
    memory, broken = 0, b""
    try:
        for module in modules:
            import_module(module)
        memory = address_space() + MOST_MEMORY
        hide_files(map(Means, means))
        die_with_parent(signal.SIGKILL, parent)  # set last: a change of rights resets it
    except BaseException as error:  # noqa: BLE001 - every call returns it
        broken = failure(error, _WORDS)
    for output in (1, 2):
        os.dup2(silence, output)
    os.close(silence)
    gc.freeze()
    pipes = (calls.fileno(), answers.fileno())
    with suppress(BrokenPipeError):  # the parent died
        for call in incoming(calls):
            if broken:
                write_frame(answers, broken)
                continue
            try:
                function = made_ready(call)
            except BaseException as error:  # noqa: BLE001 - any error of the judge fails only its sample
                write_frame(answers, failure(error, _WORDS))
            else:
                write_frame(answers, b"")
                write_frame(answers, _in_a_fork(function, call, memory, pipes))
    os._exit(0)


def _in_a_fork(function: Callable[..., Answer], call: Call, memory: int, pipes: Sequence[int]) -> bytes:
    """Make a call in a sealed process for this call alone, and return the answer."""
    parent = os.getpid()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        for pipe in (*pipes, reading):
            os.close(pipe)
        _compute(function, call.args, memory, writing, parent)
    os.close(writing)
    status = None
    try:
        deadline_s = time.monotonic() + call.timeout_s
        answer = _read(reading, deadline_s)
        status = None if answer else _ended(child, deadline_s)
    except TimeoutError:
        return _failed(f"took longer than {call.timeout_s:g} s", late=True)
    finally:
        os.close(reading)
        if status is None:  # otherwise another process may have its id
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return answer if status is None else _failed(f"its process {how_it_ended(status)}")


def _compute(function: Callable[..., Answer], args: list[Any], memory: int, writing: int, parent: int) -> Never:
    """Seal this process, make the call, write the answer, and end."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL, parent)
        allow_only_computing_with(memory)
        answer = memoryview(outcome(function, args, _WORDS))
        while answer:
            answer = answer[os.write(writing, answer) :]
        code = 0
    finally:
        os._exit(code)


def _read(reading: int, deadline_s: float) -> bytes:
    """Read everything that a process writes until it closes its output. Raises `TimeoutError`."""
    found = bytearray()
    while len(found) <= MAX_ANSWER:
        if not select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise TimeoutError
        if not (part := os.read(reading, 1 << 20)):
            return bytes(found)
        found += part
    return _failed(f"its answer is larger than {MAX_ANSWER >> 20} MiB")


def _ended(child: int, deadline_s: float) -> int:
    """The exit code of a process that wrote nothing. Raises `TimeoutError`."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(LOOK_S)


def _failed(reason: str, *, late: bool = False) -> bytes:
    return orjson.dumps({"error": reason, "trace": "", "raised": True, "late": late})

"""The child process of the kind `text`, which holds environments and answers one message after another.

It runs in the environment's Python, which may lack all of rollq's packages, so it imports only the standard library. A
message is JSON preceded by its length. Environments' output goes to the standard error. Invariant: the process ends
with its parent, even if the parent is killed.
"""

import json
import os
import random
import signal
import struct
import sys
import traceback
from importlib import import_module
from typing import Any, BinaryIO

from rollq.buffer.common.child_processes import die_with_parent
from rollq.environments.text.adapters import Adapter, adapt

LENGTH = struct.Struct(">I")
MAX_TRACE = 20_000
MAX_REASON = 1000

Message = dict[str, Any]


def serve(added: int) -> None:
    """Answer messages until the input ends. The last `added` entries of `sys.path` are only for rollq."""
    die_with_parent(signal.SIGKILL, os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole process tree: the parent decides when to end
        signal.signal(number, lambda *_: None)
    del sys.path[len(sys.path) - added :]
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    games = Games()
    try:
        while message := read(calls):
            write(answers, answer(games, message))
    except (BrokenPipeError, struct.error, ValueError):  # the parent died during a write
        pass
    os._exit(0)  # without waiting for threads that an environment left


class Games:
    """This process's environments, by episode number."""

    def __init__(self) -> None:
        self._make: Any = None
        self._open: dict[int, Adapter] = {}

    def begin(self, message: Message) -> Message:
        """Import the class. The answer says whether one process can hold several episodes."""
        sys.path[:] = message["sys_path"] if message["replaces"] else [*sys.path, *message["sys_path"]]
        module, _, name = message["path"].rpartition(".")
        self._make = getattr(import_module(module), name)
        return {"isolated": bool(getattr(self._make, "isolated", False))}

    def open(self, message: Message) -> Message:
        """Make an environment and reset it; answers with its opening."""
        seed_all(message["seed"])
        adapter = adapt(self._make, message["options"])
        self._open[message["episode"]] = adapter
        return {"messages": adapter.reset(message["seed"])}

    def step(self, message: Message) -> Message:
        """Give an environment the model's text; answers with the fields of a step."""
        return self._open[message["episode"]].step(message["text"])

    def close(self, message: Message) -> Message:
        """Close an environment."""
        adapter = self._open.pop(message["episode"], None)
        if adapter is not None:
            adapter.close()
        return {}


def seed_all(seed: int) -> None:
    """Seed the global generators, which many games use."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def answer(games: Games, message: Message) -> bytes:
    """The answer to a message; any error becomes an answer."""
    try:
        return json.dumps(getattr(games, message["do"])(message), allow_nan=False).encode()
    except BaseException as error:  # noqa: BLE001 - an environment may raise anything, even SystemExit
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
        return json.dumps({"error": reason, "trace": traceback.format_exc()[-MAX_TRACE:]}).encode()


def read(calls: BinaryIO) -> Message:
    """The next message; empty at the end of the input."""
    head = calls.read(LENGTH.size)
    if not head:
        return {}
    message: Message = json.loads(calls.read(*LENGTH.unpack(head)))
    return message


def write(answers: BinaryIO, data: bytes) -> None:
    """Write one answer."""
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()

"""`python -m rollq.environments.verifiers.runner`: runs episodes of verifiers for a worker's sessions.

usage: runner --gateway URL [--tasks NAME ...] [--concurrent N]

The gateway's key is in ROLLQ_GATEWAY_KEY or is the first line of standard input. `runner --rows` reads an environment
as JSON from standard input and writes its rows; `runner --try` writes the outcomes of the rows in that JSON.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from rollq.environments.verifiers.runner.episodes import Environments
from rollq.environments.verifiers.runner.rows import row_of
from rollq.environments.verifiers.runner.sessions import Refused, Sessions
from rollq.environments.verifiers.runner.spec import SpecError, opened
from rollq.environments.verifiers.runner.toolsets import watch_starts
from rollq.environments.verifiers.runner.trial import tried

KEY_VARIABLE = "ROLLQ_GATEWAY_KEY"
PREFIX = "ROLLQ_"
_PR_SET_DUMPABLE = 4


def main(arguments: Sequence[str]) -> int:
    """Run the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="runner")
    parser.add_argument("--gateway", help="URL of a worker's gateway")
    parser.add_argument("--tasks", nargs="*", default=[], help="tasks to take sessions from (default: all)")
    parser.add_argument("--concurrent", type=int, default=64, help="episodes that run concurrently")
    parser.add_argument("--rows", action="store_true", help="write rows instead")
    parser.add_argument("--try", action="store_true", dest="tries", help="write outcomes of rows instead")
    given = parser.parse_args(arguments)
    try:
        if given.rows or given.tries:
            write(outcomes if given.tries else rows)
        elif not given.gateway:
            parser.error("--gateway is missing")
        else:
            asyncio.run(serve(given.gateway, take_key(), given.tasks, given.concurrent))
    except (SpecError, Refused) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def write(made: Callable[[Any], Iterable[Any]]) -> None:
    """Read a request from standard input, and write each value that `made` yields for the request as a line of JSON,
    until the reader is gone. Raises `SpecError`."""
    asked = json.loads(sys.stdin.readline())
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # task sets may print
    try:
        for one in made(asked):
            lines.write(json.dumps(one) + "\n")
            lines.flush()
    except BrokenPipeError:
        os._exit(0)


def rows(asked: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of an environment. Raises `SpecError`."""
    return map(row_of, opened(asked["spec"]).env.taskset)


def outcomes(asked: Mapping[str, Any]) -> Iterator[Any]:
    """The outcomes of rows, as one object. Raises `SpecError`."""
    watch_starts()
    yield asyncio.run(tried(asked["spec"], asked["rows"]))


def take_key() -> str:
    """Return the gateway's key, and hide it from the model's programs: the key leaves the environment, and the user's
    other processes cannot read this process's memory."""
    if key := os.environ.get(KEY_VARIABLE):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        reading, writing = os.pipe()
        os.write(writing, f"{key}\n".encode())
        os.close(writing)
        os.dup2(reading, 0)
        os.execve(sys.executable, sys.orig_argv, kept)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    key = sys.stdin.readline().strip()
    if not key:
        print(f"{KEY_VARIABLE} is missing: set it to the key of the gateway", file=sys.stderr)
        raise SystemExit(2)
    return key


async def serve(gateway: str, key: str, tasks: Sequence[str], concurrent: int) -> None:
    """Play a gateway's sessions. Raises `Refused`."""
    watch_starts()
    async with AsyncExitStack() as stack:
        limits = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=60))
        )
        await Sessions(http, gateway, key, tasks).work(Environments(stack).play, concurrent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A role of any release, in a process: `python -m support.other_role URL RUN`, with its password in ROLE_PASSWORD.

It makes a move for each word that it reads, and answers with a line: `done`, or the error.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RollqError
from support.buffer_run import World


class Moves:
    """The moves of a role, by their words."""

    def __init__(self, buffer: Buffer) -> None:
        self._world = World(buffer)
        self._leases: Any = ()
        self.by_word: Mapping[str, Callable[[], object]] = {
            "start": self._world.start,
            "join": self._world.buffer.create_run,
            "admit": lambda: self._world.admit(2),
            "lease": self._lease,
            "put": lambda: self._world.put(self._leases),
            "train": lambda: self._world.train(1),
        }

    def _lease(self) -> None:
        self._leases = self._world.lease(2)


def main() -> None:
    """Make moves until the input ends."""
    url, run = sys.argv[1:]
    with Buffer.connect(url, run, password=os.environ.get("ROLE_PASSWORD")) as buffer:
        moves = Moves(buffer).by_word
        print("done", flush=True)
        for line in sys.stdin:
            try:
                moves[line.strip()]()
            except RollqError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            else:
                print("done", flush=True)


if __name__ == "__main__":
    main()

"""`make test-busy`: runs a command beside four busy processes, as on a machine that does other work too.

The busy processes are children of the command. They watch for its end and end with it, even if it is killed.

Usage: python tests/busy.py COMMAND [ARGUMENT ...]
"""

import os
import subprocess
import sys
from typing import NoReturn

BUSY_PROCESSES = 4
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


def main(command: list[str]) -> NoReturn:
    for _ in range(BUSY_PROCESSES):
        # a process group each, so that Ctrl-C does not reach them: it is for the command
        subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())], process_group=0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

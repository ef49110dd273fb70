"""Replaces itself with an MCP server's command, so that the server dies with the worker. It runs as a program,
`launcher PARENT COMMAND...`, and imports only the standard library.
"""

import os
import signal
import sys

from rollq.buffer.common.child_processes import die_with_parent

NOT_FOUND = 127


def main(parent: int, command: list[str]) -> int:
    """Replace this process with the command. Returns only if the command does not exist."""
    die_with_parent(signal.SIGKILL, parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

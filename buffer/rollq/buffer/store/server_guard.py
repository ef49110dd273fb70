"""The small process between an embedded server and the process that started it. This guard runs as a program, imports
only the standard library, and is the server's parent. It reads the server's configuration from standard input, so that
a password never appears in `ps` or in a file, and writes the server's pid to standard output. From then on, the server
lives as long as standard input stays open. When the starting process closes the input or dies, however abruptly, the
guard shuts the server down cleanly, and kills it if it does not exit within the grace period. If the guard is killed,
Linux sends the server SIGTERM.

usage: server_guard GRACE_S CONFIG_BYTES LOCK_FD BINARY
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import FrameType

from rollq.buffer.common.child_processes import die_with_parent


def main(grace_s: int, config_bytes: int, lock_fd: int, binary: str) -> int:
    """Run the server until it exits or the guard's input ends; return its exit status."""
    config = read_config(config_bytes)
    # The lock on the data directory is inherited, so that it is held exactly as long as the server lives.
    # preexec_fn is safe here: this process has one thread.
    server = subprocess.Popen(
        [binary, "-"],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=(lock_fd,),
        env={**os.environ, "LC_ALL": "C"},
        preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
    )

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.terminate()
        signal.alarm(grace_s)

    signal.signal(signal.SIGALRM, lambda _signal, _frame: server.kill())
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"%d\n" % server.pid)
    hand_over(server, config)
    return server.wait()


def read_config(size: int) -> bytes:
    """Read exactly `size` bytes from standard input, or exit if the starting process is gone."""
    config = b""
    while len(config) < size:
        part = os.read(sys.stdin.fileno(), size - len(config))
        if not part:
            sys.exit(1)
        config += part
    return config


def hand_over(server: "subprocess.Popen[bytes]", config: bytes) -> None:
    """Send the server its configuration."""
    if server.stdin is not None:
        with contextlib.suppress(BrokenPipeError), server.stdin:
            server.stdin.write(config)


def stop_at_end_of_input() -> None:
    """Wait for the starting process to close the input or die, then stop the server through the signal handler."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))

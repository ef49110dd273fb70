"""Finds free TCP ports on this machine."""

import random
import socket

from rollq.buffer.errors import ServerUnavailable

# Below the ephemeral ports, so that no outgoing connection takes the port, and no connection attempt to a port without
# a listener connects to itself.
PORTS = range(20_000, 32_768)


def free_port(bind: str) -> int:
    """Return a port that is free now. Another process may take it, so the caller must be ready to try again."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for port in random.sample(PORTS, k=200):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((bind, port))
            except OSError:
                continue
        return port
    raise ServerUnavailable(f"found no free port between {PORTS.start} and {PORTS.stop - 1} on {bind}")

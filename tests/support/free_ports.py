"""Ports for a cluster whose nodes are told where to listen."""

import socket
from contextlib import ExitStack

from rollq.buffer.common.ports import free_port
from rollq.buffer.store.embedded_cluster import BUS_OFFSET


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free, as are those that the nodes use among themselves."""
    while True:
        first = free_port("127.0.0.1")
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    for one in (port, port + BUS_OFFSET):
                        probes.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except (OSError, OverflowError):
                continue
        return first

"""Limits a server's connections to a share of the files that its process may open."""

import ipaddress
import resource
from dataclasses import dataclass
from typing import Any, Final

MOST_CONNECTIONS: Final = 4096
MOST_OF_ADDRESS: Final = 256
MOST_OF_TOKEN: Final = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections: in total, from one address without a token, and with one token before connections with
    other tokens take precedence."""

    most: int
    most_of_address: int
    most_of_token: int


def limits_for(open_files: int) -> ConnectionLimits:
    """The limits for a process that may open `open_files` files and reserves half of them. Pure."""
    most = max(8, min(open_files // 2, MOST_CONNECTIONS))
    return ConnectionLimits(most, min(most // 4, MOST_OF_ADDRESS), min(most // 4, MOST_OF_TOKEN))


def limits_here() -> ConnectionLimits:
    """The limits for this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits_for(2 * MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files)


def address_of(peer: Any) -> str:
    """A connection's owner: the IPv4 address, or an IPv6 address's /64 network, which one host owns. Pure.

    `peer` is the peer's address, as `socket.accept` returns it.
    """
    host = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) else str(peer)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))

"""Sorts libraries of functions on a server: which releases use them, and which may be deleted. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollq.buffer.store.library import connection_name, is_digest, library_name

PREFIX = "rollq_"
"""The beginning of the names of rollq's libraries; the digest of the release follows."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """rollq's libraries on a server, by name. `used` has the connections of each."""

    used: Mapping[str, int]
    unused: Sequence[str]
    unknown: Sequence[str]  # of releases whose connections had no names, such as rollq_5


def sort_libraries(names: Iterable[str], connections: Iterable[str]) -> Libraries:
    """Sort the libraries `names` by the names of all connections to the server. This release's library is always in
    use."""
    counts = Counter(connections)
    named = {name: counts[connection_name(name)] for name in sorted(names) if is_digest(release_of(name))}
    used = {name: count for name, count in named.items() if count or name == library_name()}
    return Libraries(
        used=used,
        unused=[name for name in named if name not in used],
        unknown=[name for name in sorted(names) if name not in named and release_of(name).isdecimal()],
    )


def release_of(library: str) -> str:
    """The digest of the release that has this library."""
    return library.removeprefix(PREFIX)

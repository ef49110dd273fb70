"""Sorts a server's function libraries: which releases use them, and which may be deleted. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollq.buffer.store.library import connection_name, is_digest, library_name

PREFIX = "rollq_"
"""The prefix of rollq's library names; the release's digest follows."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """rollq's libraries on a server, by name. `used` maps each to its connections."""

    used: Mapping[str, int]
    unused: Sequence[str]
    unknown: Sequence[str]  # of releases whose connections had no names, such as rollq_5


def sort_libraries(names: Iterable[str], connections: Iterable[str] | None) -> Libraries:
    """Sort the libraries `names` by the names of all `connections` to the server, None if unknown. This release's
    library is always in use."""
    counts, used = Counter(connections), dict[str, int]()
    unused, unknown = list[str](), list[str]()
    for name in sorted(names):
        count, release = counts[connection_name(name)], release_of(name)
        if is_digest(release) and (count or name == library_name()):
            used[name] = count
        elif is_digest(release):
            unused.append(name)
        elif release.isdecimal():
            unknown.append(name)
    return Libraries(used, unused, unknown)


def release_of(library: str) -> str:
    """The digest of the release that has this library."""
    return library.removeprefix(PREFIX)

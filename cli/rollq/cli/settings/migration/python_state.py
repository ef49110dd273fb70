"""The names and objects of a Python settings file, with trials of branches that may or may not run. Every change is
noted, so that a branch can be tried and undone. Invariant: after such branches, a name or a field has a known value
only if the value is the same whichever branch ran.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, TypeVar

from rollq.cli.settings.migration.values import REST, Several, Unknown, are_all, containers, same, shown

Slot = tuple[int, Any]
Scope = dict[Any, Any]
Owner = TypeVar("Owner", dict[Any, Any], list[Any])
_ABSENT: Final = object()
_WHOLE: Final = object()
"""The key of a change to a list, which is noted as a whole."""


class Ended(Exception):
    """Ends a block before its last statement."""


class Raised(Ended):
    """The file raises an error here."""


class Returned(Ended):
    """Ends one of the file's functions."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Left(Ended):
    """`break`, or `continue`, in a loop."""

    def __init__(self, *, is_break: bool) -> None:
        self.is_break = is_break


@dataclass(frozen=True, slots=True)
class Change:
    """A dictionary or list, the key that changed in it, and the key's value at some time."""

    owner: Any
    key: Any
    value: Any


@dataclass(slots=True)
class Outcome:
    """A branch's changes, and how the branch ends."""

    changes: dict[Slot, Change] = field(default_factory=dict)
    born: dict[int, Any] = field(default_factory=dict)
    """The objects that the branch made. No other branch has them."""
    end: Ended | None = None


class State:
    """Notes changes to dictionaries and lists. Dictionaries hold objects' fields and scopes' names."""

    def __init__(self) -> None:
        self._journals: list[dict[Slot, Change]] = [{}]
        self._born: list[dict[int, Any]] = [{}]

    def new(self, owner: Owner) -> Owner:
        """Note that a dictionary or list is new, and return it."""
        self._born[-1][id(owner)] = owner
        return owner

    def write(self, owner: Scope, key: Any, value: Any) -> None:
        """Set a key of a dictionary."""
        self._note(owner, key)
        owner[key] = value

    def remove(self, owner: Scope, key: Any) -> None:
        """Remove a key of a dictionary."""
        self._note(owner, key)
        owner.pop(key, None)

    def rewrite(self, owner: list[Any], items: Iterable[Any]) -> None:
        """Give a list other items."""
        self._note(owner, _WHOLE)
        owner[:] = list(items)

    def begin(self) -> None:
        """Note changes separately, until `end`."""
        self._journals.append({})
        self._born.append({})

    def end(self) -> list[Change]:
        """The changes since `begin` to earlier objects, each with the previous value."""
        changes, born = self._journals.pop(), self._born.pop()
        for slot, change in changes.items():
            self._journals[-1].setdefault(slot, change)
        self._born[-1] |= born
        return [change for (owner, _), change in changes.items() if owner not in born]

    def tried(self, run: Callable[[], None]) -> Outcome:
        """Run a branch, undo it, and return its changes."""
        outcome = Outcome()
        self.begin()
        try:
            run()
        except Ended as end:
            outcome.end = end
        before, outcome.born = self._journals.pop(), self._born.pop()
        outcome.changes = {slot: Change(one.owner, one.key, _now(one)) for slot, one in before.items()}
        for change in before.values():
            _put(change)
        return outcome

    def merge(self, outcomes: list[Outcome]) -> None:
        """Make the changes of one of several branches: a value that differs between branches is unknown."""
        slots = {}
        for outcome in outcomes:
            self._born[-1] |= outcome.born
            for slot, change in outcome.changes.items():
                if slot[0] in outcome.born:
                    self._set(change, change.value)
                else:
                    slots[slot] = change
        for slot, one in slots.items():
            now = Change(one.owner, one.key, _now(one))
            values = [outcome.changes.get(slot, now).value for outcome in outcomes]
            self._set(one, either(values))

    def blur(self, changes: Iterable[Change], text: str) -> None:
        """Make unknown all that may have changed any number of times. Each change has the previous value."""
        for before in changes:
            now = _now(before)
            if same(before.value, now):
                continue
            if before.key is _WHOLE:
                self._set(before, _grown(before.value, now, text))
            else:
                self._set(before, Unknown(text))

    def disturb(self, value: Any, text: str) -> None:
        """Make an object and everything reachable from it unknown, because unknown code had access to it."""
        for part in containers(value):
            if isinstance(part, list):
                self.rewrite(part, [Several(text)])
            elif isinstance(part, dict):
                self.clear(part)
                self.write(part, REST, Unknown(text))

    def clear(self, owner: Scope) -> None:
        """Remove all keys of a dictionary."""
        for key in list(owner):
            self.remove(owner, key)

    def _note(self, owner: Any, key: Any) -> None:
        slot = (id(owner), key if key is not _WHOLE else None)
        if slot not in self._journals[-1]:
            self._journals[-1][slot] = Change(owner, key, _now(Change(owner, key, None)))

    def _set(self, place: Change, value: Any) -> None:
        self._note(place.owner, place.key)
        _put(Change(place.owner, place.key, value))


def _now(place: Change) -> Any:
    return list(place.owner) if place.key is _WHOLE else place.owner.get(place.key, _ABSENT)


def _put(change: Change) -> None:
    if change.key is _WHOLE:
        change.owner[:] = change.value
    elif change.value is _ABSENT:
        change.owner.pop(change.key, None)
    else:
        change.owner[change.key] = change.value


def either(values: list[Any]) -> Any:
    """The value that several branches share, or an unknown value if they differ."""
    return values[0] if all(same(values[0], value) for value in values[1:]) else _either(values)


def _either(values: list[Any]) -> Any:
    texts = list(dict.fromkeys("nothing" if value is _ABSENT else shown(value, 40) for value in values))
    text = " or ".join(texts[:4])
    if not are_all(list, values):
        return Unknown(text)
    shared = len(list(takewhile(_are_same, zip(*values, strict=False))))
    left = next(value[shared:] for value in values if len(value) > shared)
    return [*values[0][:shared], Several.of(text, left)]


def _are_same(values: tuple[Any, ...]) -> bool:
    return all(same(value, values[0]) for value in values)


def _grown(before: list[Any], now: list[Any], text: str) -> list[Any]:
    """A list after an unknown number of rounds of a loop. All added items are alike."""
    kept = [item for item in before if not isinstance(item, Several)]
    if not same(before, now[: len(before)]):
        return [Several(text)]
    new = now[len(before) :]
    return [*kept, Several(text, new[0] if len(new) == 1 else None)]

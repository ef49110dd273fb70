"""Every order in which the calls of several roles can reach the server, each played on the real one.

A role is a function in a thread. It pauses before each of its trips to the server, and the exploration chooses who goes
on. Where a state was seen before, with the same replies so far, what follows is known and is not played again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.pipelining import Command
from rollq.buffer.store.redis_functions import Call
from support.buffer_run import World, set_clock
from support.late_copies import READ
from support.waiting import PATIENCE_S

Act = Callable[["Role"], Any]


class _Abandoned(BaseException):
    """Ends the thread of a role whose future is known."""


class Role:
    """One role: `buffer` pauses before each trip. `result` is what `act` has returned."""

    def __init__(self, buffer: "PausingBuffer", act: Act) -> None:
        self.buffer, self.result, self.is_done, self.replies = buffer, None, False, list[str]()
        buffer.role = self
        self._act, self._error, self._is_abandoned = act, list[BaseException](), False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await()

    def pause(self) -> None:
        """Wait, in the role's thread, until the role is chosen."""
        self._paused.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def step(self) -> None:
        """Let the role make its next trip, and everything after it up to the trip that follows."""
        self._go.release()
        self._await()

    def abandon(self) -> None:
        """End the role where it is."""
        self._is_abandoned = True
        self._go.release()
        self._thread.join(PATIENCE_S)
        self.buffer.role = None

    def _await(self) -> None:
        assert self._paused.acquire(timeout=PATIENCE_S), "the role neither ends nor asks the server"
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            self.result = self._act(self)
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's thread
            self._error.append(error)
        self.is_done = True
        self.buffer.role = None
        self._paused.release()


class PausingBuffer(Buffer):
    """A buffer whose role, if it has one, pauses before each trip to the server and notes each reply."""

    role: Role | None = None

    def _trip(self, make: Callable[[], Any]) -> Any:
        role = self.role
        if role is None or threading.current_thread() is threading.main_thread():
            return make()
        role.pause()
        reply = make()
        role.replies.append(repr(reply))
        return reply

    def call(self, name: str, key: str, *args: Any) -> Any:
        return self._trip(lambda: super(PausingBuffer, self).call(name, key, *args))

    def call_each(self, calls: Callable[[], Iterable[Call]]) -> list[Any]:
        found: list[Any] = self._trip(lambda: super(PausingBuffer, self).call_each(calls))
        return found

    def send(self, *command: Any) -> Any:
        return self._trip(lambda: super(PausingBuffer, self).send(*command))

    def send_all(self, commands: Sequence[Command], read: Callable[[int, Any], Any] | None = None) -> list[Any]:
        found: list[Any] = self._trip(lambda: super(PausingBuffer, self).send_all(commands, read))
        return found


def explore(
    world: World,
    acts: Mapping[str, tuple[PausingBuffer, Act]],
    check: Callable[[Mapping[str, Any]], None],
    *,
    only: tuple[str, ...] = (),
) -> int:
    """Play all orders of the trips of `acts` from the present state of the run, and `check` the results of each.

    With `only`, play just that order, after which the roles end one by one. Returns how many ends there are: what
    comes after a state that was seen before is checked once.
    """
    start = _dump(world)
    orders = [only]
    seen: set[object] = set()
    checked = 0
    while orders:
        order = orders.pop()
        _restore(world, start)
        roles = {name: Role(buffer, act) for name, (buffer, act) in acts.items()}
        taken: list[str] = []
        while waiting := [name for name, role in roles.items() if not role.is_done]:
            if len(taken) < len(order):
                chosen = order[len(taken)]
            else:
                state = (_state(world), *(("", *role.replies) for role in roles.values()))
                if state in seen:
                    break
                seen.add(state)
                chosen, *others = waiting
                orders += [] if only else [(*taken, other) for other in others]
            roles[chosen].step()
            taken.append(chosen)
        for name in waiting:
            roles[name].abandon()
        if not waiting:
            try:
                check({name: role.result for name, role in roles.items()})
            except BaseException as error:
                error.add_note(f"in the order {' '.join(taken)}")
                raise
            checked += 1
    return checked


def _dump(world: World) -> dict[bytes, bytes]:
    client: Any = world.buffer.client
    return {key: client.dump(key) for key, *_ in _read(world)}


def _restore(world: World, dumped: Mapping[bytes, bytes]) -> None:
    client: Any = world.buffer.client
    with client.pipeline(transaction=True) as pipeline:
        for key, *_ in _read(world):
            pipeline.delete(key)
        for key, content in dumped.items():
            pipeline.restore(key, 0, content)
        pipeline.execute()
    for task in world.buffer.tasks():
        set_clock(world.buffer, task)  # the server knows clocks by revisions, which begin again here


def _read(world: World) -> list[Any]:
    client: Any = world.buffer.client
    found: list[Any] = client.eval(READ, 0, f"rollq:{{{world.buffer.run}*")
    return sorted(found)


def _state(world: World) -> object:
    """What is stored of the run, without times."""
    found = []
    for key, kind, content in _read(world):
        if kind == b"hash":
            fields = zip(content[::2], content[1::2], strict=True)
            content = sorted(field for field in fields if not field[0].endswith((b"_ms", b"revision")))
        elif kind == b"zset":
            content = content[::2]
        found.append((key, repr(content)))
    return tuple(found)

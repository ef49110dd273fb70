"""The trainer's side of a round: it gathers workers, meets them in one group, and sends them every tensor.

Invariant: an attempt always ends within `join_s` plus `timeout_s`, whoever died in it, and the weights stay on offer
until newer ones are announced: who missed them gets them while the trainer waits for a batch.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Protocol

from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.broadcast_log import LOOK_S, Broadcast, BroadcastLog, TensorSpec, assign_ranks
from rollq.buffer.weights.store import StoredWeights

log = logging.getLogger(__name__)


class ProcessGroup(Protocol):
    """Processes that tensors are sent to; this one is rank 0. Making it blocks until all are there."""

    def send(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Send tensors in this order; returns when they have been read from memory."""

    def close(self) -> None:
        """Leave; called from another thread, it ends a `send` that hangs."""


class Rendezvous(Protocol):
    """Makes groups of one kind."""

    def __call__(self, address: str, port: int, world_size: int) -> ProcessGroup:
        """Meet `world_size - 1` others, who come to this address and port."""

    def init_info(self, address: str, port: int, world_size: int) -> dict[str, Any]:
        """What engines need to come, but for their rank."""


class Sender:
    """Sends one version's weights after the other. One thread owns it; only `keep` may be called from others."""

    def __init__(
        self, buffer: TrainerBuffer, meeting: Rendezvous, *, address: str, join_s: float, timeout_s: float
    ) -> None:
        self._buffer = buffer
        self._meeting = meeting
        self._address = address
        self._join_s = join_s
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._log: BroadcastLog | None = None
        self._tensors: Mapping[str, Any] = {}
        self._looked_s = 0.0

    def announce(self, tensors: Mapping[str, Any], version: int) -> StoredWeights:
        """Begin the round of a version, and say how its weights are called. The same version has one round."""
        self._tensors = dict(tensors)
        if self._log is None or version != self._version:
            specs = [TensorSpec(name, dtype_name(one), tuple(one.shape)) for name, one in tensors.items()]
            self._log, self._stored = BroadcastLog.open(
                self._buffer, specs, join_s=self._join_s, timeout_s=self._timeout_s
            )
            self._version = version
        return self._stored

    def send(self) -> None:
        """Send what was announced, and is published, to all workers that can take it; keep a copy for late ones.

        Afterwards the tensors may change.
        """
        if self._log is None:
            return
        found = self._log.read()
        expected = self._receivers() - found.took
        if expected or found.current.open:
            self._attempt(self._log, expected)
        self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors.items()}

    def serve_late(self) -> None:
        """Send the weights to those who have missed them, if there are any. Call it whenever the trainer waits."""
        if self._log is None or monotonic() - self._looked_s < LOOK_S:
            return
        late = self._log.read().late & self._receivers()
        if late:
            self._attempt(self._log, late)
        self._looked_s = monotonic()

    def forget(self) -> None:
        """Other weights are published, by another way."""
        self._log, self._tensors = None, {}

    def keep(self) -> None:
        """Have the round's log live on."""
        if (round_log := self._log) is not None:
            round_log.keep()

    def _receivers(self) -> set[str]:
        """Workers that could take weights now."""
        return {
            name
            for name, report in self._buffer.workers().items()
            if report.get("transfer_ranks") and report.get("state") != "asleep"
        }

    def _attempt(self, round_log: BroadcastLog, expected: set[str]) -> None:
        """Meet those of `expected` that get ready in time, and whoever else does, and send them the weights."""
        found = round_log.read()
        if found.current.over is not None:
            round_log.append({"opened": True, "attempt": len(found.attempts) + 1})
            found = round_log.read()
        number = len(found.attempts)

        stop = self._buffer.closed

        def all_there(found: Broadcast) -> bool:
            return stop.is_set() or expected <= found.current.ready.keys() | found.current.broken.keys()

        ready = dict(round_log.wait(all_there, self._join_s).current.ready)
        error = "the trainer ends" if stop.is_set() else self._meet(round_log, number, ready) if ready else ""
        round_log.append({"over": error, "attempt": number})
        took = round_log.read().attempts[number - 1].took
        level = logging.WARNING if error or took < expected else logging.INFO
        log.log(
            level,
            "weights of version %s, attempt %d: %d of %d workers took them%s",
            self._version,
            number,
            len(took),
            len(expected | ready.keys()),
            f"; {error}" if error else "",
        )

    def _meet(self, round_log: BroadcastLog, number: int, ready: Mapping[str, int]) -> str:
        """Name those who are ready members, and send; returns why it came to nothing, or nothing."""
        members, world_size = assign_ranks(ready), 1 + sum(ready.values())
        port = free_port()
        transfer = _Transfer(lambda: self._meeting(self._address, port, world_size), self._tensors)
        transfer.start()
        meeting = self._meeting.init_info(self._address, port, world_size)
        round_log.append({"members": members, "meeting": meeting, "attempt": number})

        def over(found: Broadcast) -> bool:
            attempt = found.attempts[number - 1]
            broken = attempt.broken.keys() & members.keys()
            return bool(transfer.error or broken) or (transfer.sent and members.keys() <= attempt.took)

        attempt = round_log.wait(over, self._timeout_s).attempts[number - 1]
        transfer.leave()
        broken = {worker: error for worker, error in attempt.broken.items() if worker in members}
        return "" if transfer.sent else transfer.error or why(broken, members, self._timeout_s)


class _Transfer(threading.Thread):
    """Meets the members and sends, in a thread of its own: a dead peer can hang it for ever."""

    def __init__(self, meet: Callable[[], ProcessGroup], tensors: Mapping[str, Any]) -> None:
        super().__init__(name="rollq-round", daemon=True)
        self._meet = meet
        self._tensors = tensors
        self._group: ProcessGroup | None = None
        self._left = False
        self._lock = threading.Lock()
        self.sent = False
        self.error = ""

    def run(self) -> None:
        try:
            group = self._meet()
            with self._lock:
                self._group, left = group, self._left
            if left:  # nobody waits for it any more
                group.close()
                return
            group.send(self._tensors.items())
            self.sent = True
        except Exception as error:  # noqa: BLE001 - a library's error about a peer, whatever its class, ends the attempt
            self.error = f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """Leave the group, whatever happens in it."""
        with self._lock:
            self._left, group = True, self._group
        if group is not None:
            group.close()


def why(broken: Mapping[str, str], members: Mapping[str, int], timeout_s: float) -> str:
    """What held an attempt back."""
    if broken:
        return "; ".join(f"{worker}: {error}" for worker, error in sorted(broken.items()))
    return f"not all of {', '.join(sorted(members))} met and took the weights within {timeout_s:g} s"


def dtype_name(tensor: Any) -> str:
    """`bfloat16` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

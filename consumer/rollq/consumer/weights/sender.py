"""The trainer's side of a weight broadcast: it gathers workers in a process group and sends them every tensor.

Invariant: an attempt ends within `join_s` plus `timeout_s` seconds, even if any process dies during it. The weights
stay available until newer weights are announced: workers that missed them get them while the trainer waits for a batch.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Protocol

from rollq.buffer.common.ports import free_port
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.broadcast_log import LOOK_S, Broadcast, BroadcastLog, TensorSpec, assign_ranks
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import StoredWeights

log = logging.getLogger(__name__)


class ProcessGroup(Protocol):
    """A process group whose rank 0 is this process."""

    def send(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Broadcast tensors in this order; returns when they have been read from memory."""

    def close(self) -> None:
        """Leave the group. Called from another thread, it ends a `send` that hangs."""


class Rendezvous(Protocol):
    """Creates process groups of one kind, such as NCCL's."""

    def __call__(self, address: str, port: int, world_size: int) -> ProcessGroup:
        """Create a group at this address and port; blocks until `world_size - 1` other processes have joined."""

    def init_info(self, address: str, port: int, world_size: int) -> dict[str, Any]:
        """The parameters, except for the rank, with which engines join the group."""


class Sender:
    """Broadcasts one version of the weights after another. Use it from one thread; only `keep` is thread-safe."""

    def __init__(
        self, buffer: TrainerBuffer, rendezvous: Rendezvous, *, address: str, join_s: float, timeout_s: float
    ) -> None:
        self._buffer = buffer
        self._rendezvous = rendezvous
        self._address = address
        self._join_s = join_s
        self._timeout_s = timeout_s
        self._version: int | None = None
        self._log: BroadcastLog | None = None
        self._tensors: Mapping[str, Any] = {}
        self._checked_late_s = 0.0

    def announce(self, tensors: Mapping[str, Any], version: int, probe: Probe | None = None) -> StoredWeights:
        """Open the broadcast of a version and return the name of its weights. Each version has one broadcast."""
        self._tensors = dict(tensors)
        if self._log is None or version != self._version:
            specs = [TensorSpec(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
            self._log, self._stored = BroadcastLog.open(
                self._buffer, specs, join_s=self._join_s, timeout_s=self._timeout_s, probe=probe
            )
            self._version = version
        return self._stored

    def send(self) -> None:
        """Send the announced and published weights to all workers that can take them. Keeps a copy for late workers.

        The tensors may change once this returns.
        """
        if self._log is None:
            return
        broadcast = self._log.read()
        expected = self._receivers() - broadcast.took
        if expected or broadcast.current.open:
            self._attempt(self._log, expected)
        self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors.items()}

    def serve_late(self) -> None:
        """Send the weights to workers that missed them. Call it whenever the trainer waits."""
        if self._log is None or monotonic() - self._checked_late_s < LOOK_S:
            return
        late = self._log.read().late & self._receivers()
        if late:
            self._attempt(self._log, late)
        self._checked_late_s = monotonic()

    def forget(self) -> None:
        """Drop the announced weights, because others are published without a broadcast."""
        self._log, self._tensors = None, {}

    def keep(self) -> None:
        """Renew the expiry of the broadcast's log."""
        if (broadcast_log := self._log) is not None:
            broadcast_log.keep()

    def _receivers(self) -> set[str]:
        """Workers that can take weights now."""
        return {
            name
            for name, report in self._buffer.workers().items()
            if report.get("transfer_ranks") and report.get("state") != "asleep"
        }

    def _attempt(self, broadcast_log: BroadcastLog, expected: set[str]) -> None:
        """Send the weights to every worker that is ready within `join_s`, or once all `expected` workers are ready."""
        broadcast = broadcast_log.read()
        if broadcast.current.over is not None:
            broadcast_log.append({"opened": True, "attempt": len(broadcast.attempts) + 1})
            broadcast = broadcast_log.read()
        number = len(broadcast.attempts)
        stop = self._buffer.closed

        def all_there(broadcast: Broadcast) -> bool:
            return stop.is_set() or expected <= broadcast.current.ready.keys() | broadcast.current.broken.keys()

        ready = dict(broadcast_log.wait(all_there, self._join_s).current.ready)
        error = ""
        if stop.is_set():
            error = "the trainer is stopping"
        elif ready:
            error = self._send_to(broadcast_log, number, ready)
        broadcast_log.append({"over": error, "attempt": number})
        took = broadcast_log.read().attempts[number - 1].took
        log.log(
            logging.WARNING if error or took < expected else logging.INFO,
            "weights of version %s, attempt %d: %d of %d workers took them%s",
            self._version,
            number,
            len(took),
            len(expected | ready.keys()),
            f"; {error}" if error else "",
        )

    def _send_to(self, broadcast_log: BroadcastLog, number: int, ready: Mapping[str, int]) -> str:
        """Make the `ready` workers (name -> ranks) members of an attempt, and send. Returns why it failed, or
        ""."""
        members, world_size = assign_ranks(ready), 1 + sum(ready.values())
        port = free_port("")
        transfer = _Transfer(lambda: self._rendezvous(self._address, port, world_size), self._tensors)
        transfer.start()
        init_info = self._rendezvous.init_info(self._address, port, world_size)
        broadcast_log.append({"members": members, "meeting": init_info, "attempt": number})

        def over(broadcast: Broadcast) -> bool:
            attempt = broadcast.attempts[number - 1]
            broken = attempt.broken.keys() & members.keys()
            return bool(transfer.error or broken) or (transfer.sent and members.keys() <= attempt.took)

        attempt = broadcast_log.wait(over, self._timeout_s).attempts[number - 1]
        transfer.leave()
        broken = {worker: error for worker, error in attempt.broken.items() if worker in members}
        return "" if transfer.sent else transfer.error or failure(broken, members, self._timeout_s)


class _Transfer(threading.Thread):
    """Joins the process group and sends in a separate thread, which a dead peer can block indefinitely."""

    def __init__(self, connect: Callable[[], ProcessGroup], tensors: Mapping[str, Any]) -> None:
        super().__init__(name="rollq-broadcast", daemon=True)
        self._connect = connect
        self._tensors = tensors
        self._group: ProcessGroup | None = None
        self._left = False
        self._lock = threading.Lock()
        self.sent = False
        self.error = ""

    def run(self) -> None:
        try:
            group = self._connect()
            with self._lock:
                self._group, left = group, self._left
            if left:  # the attempt is over
                group.close()
                return
            group.send(self._tensors.items())
            self.sent = True
        except Exception as error:  # noqa: BLE001 - a library may raise any class for a dead peer
            self.error = f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """Leave the group, even while a call in it hangs."""
        with self._lock:
            self._left, group = True, self._group
        if group is not None:
            group.close()


def failure(broken: Mapping[str, str], members: Mapping[str, int], timeout_s: float) -> str:
    """Why an attempt failed: the errors of `broken` workers (name -> error), or else the timeout."""
    if broken:
        return "; ".join(f"{worker}: {error}" for worker, error in sorted(broken.items()))
    return f"not all of {', '.join(sorted(members))} joined and took the weights within {timeout_s:g} s"


def dtype_name(tensor: Any) -> str:
    """The name of a tensor's dtype without its module, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")

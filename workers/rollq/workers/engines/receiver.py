"""The worker's side of weight broadcasts, in which the trainer sends weights straight into engines.

Invariant: an engine joins the trainer's process group only after the trainer has named the engine's worker a member of
the attempt. Until then, the engine is unchanged. Afterwards, it serves the new weights or is dead, since partly loaded
weights are unusable.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.broadcast_log import LOOK_S, Broadcast, BroadcastLog
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engines.tensors import torch_tensor

SLACK_S = 10.0
"""How many seconds longer than the trainer a worker waits before the trainer counts as dead."""


class TooLate(WeightsError):
    """A weight broadcast started without this worker. The worker joins the next attempt."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Arguments for vLLM's weight transfer: how to connect to the trainer, and which tensors the trainer sends."""

    init_info: Mapping[str, Any]
    update_info: Mapping[str, Any]


@runtime_checkable
class Receiver(Protocol):
    """The additional methods of an `Engine` that can receive weights from the trainer."""

    @property
    def transfer_ranks(self) -> int:
        """The number of ranks that this engine adds to the process group, one per GPU; 0 if it was started without
        weight transfer."""

    async def receive(self, incoming: "Incoming", version: WeightsVersion, mode: SwapMode) -> float:
        """Like `Engine.swap`, for weights that the trainer sends as `version`.

        Compares `incoming.tensors` with the model, drains requests according to `mode`, calls `incoming.join`, and
        takes the weights. Raises `WeightsError` if the engine still serves the old weights, and `EngineDead` if it
        serves none.
        """


class BroadcastReceiver:
    """The broadcasts that one worker takes part in."""

    def __init__(self, calls: BufferCalls, worker: str) -> None:
        self._calls = calls
        self._worker = worker
        self._entered: tuple[int, int] | None = None

    async def enter(self, live: LiveModel, number: int) -> "Incoming":
        """Join the open attempt at broadcast `number`, which carries the live weights.

        Raises `TooLate`, and informs the trainer, if no attempt is open or this worker has already entered the open
        attempt. Raises `WeightsError` if the broadcast has expired or differs from the announced broadcast.
        """
        round_log = BroadcastLog(self._calls.buffer, number)
        broadcast = await self._calls(round_log.read)
        if broadcast.digest != live.digest:
            raise WeightsError(f"broadcast {number} is not the one that was announced: publish the weights again")
        attempt = (number, len(broadcast.attempts))
        if broadcast.current.open and attempt != self._entered:
            self._entered = attempt
            return Incoming(self._calls, round_log, broadcast, self._worker)
        if self._worker not in broadcast.late:
            await self._calls(round_log.append, {"late": self._worker})
        raise TooLate(f"weight broadcast {number} started without {self._worker!r}")


class Incoming:
    """One worker's view of an attempt at a broadcast."""

    def __init__(self, calls: BufferCalls, round_log: BroadcastLog, broadcast: Broadcast, worker: str) -> None:
        self.number = round_log.number
        self.tensors = {spec.name: torch_tensor(spec.dtype, spec.shape) for spec in broadcast.tensors}
        self.probe = broadcast.probe
        self._calls = calls
        self._log = round_log
        self._found = broadcast
        self._attempt = broadcast.current
        self._index = len(broadcast.attempts)
        self._worker = worker
        self._joined = asyncio.Event()

    async def join(self, ranks: int) -> TransferPlan:
        """Report that the engine is ready, and wait until the trainer names the members.

        Raises `TooLate` if this worker is not a member, or if the attempt is already over.
        """
        await self._append({"ready": self._worker, "ranks": ranks})
        await self._wait(lambda: not self._attempt.open, self._found.join_s + SLACK_S)
        members = self._attempt.members or {}
        if self._worker not in members or self._attempt.over is not None:
            raise TooLate(f"weight broadcast {self.number} started without {self._worker!r}")
        self._joined.set()
        tensors = self._found.tensors
        return TransferPlan(
            {**self._attempt.meeting, "rank_offset": members[self._worker]},
            {
                "names": [spec.name for spec in tensors],
                "dtype_names": [spec.dtype for spec in tensors],
                "shapes": [list(spec.shape) for spec in tensors],
            },
        )

    async def take(self, receiving: Awaitable[float]) -> float:
        """Wait until the engine has taken the weights, the attempt fails, or the trainer falls silent. Returns the
        result of `receiving`, in seconds.

        Raises `EngineDead` in the last two cases, because the engine then hangs in an incomplete process group.
        """
        taking, watching = asyncio.ensure_future(receiving), asyncio.ensure_future(self._given_up())
        try:
            await asyncio.wait([taking, watching], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise EngineDead(f"it hangs in weight broadcast {self.number}: {watching.result()}")
            swap_pause_s = await taking
        except TooLate:
            raise
        except (WeightsError, EngineDead) as error:
            await self._append({"broken": self._worker, "error": str(error)})
            raise
        finally:
            taking.cancel()
            watching.cancel()
        await self._append({"took": self._worker})
        return swap_pause_s

    async def _given_up(self) -> str:
        """Wait until this attempt fails or takes too long, and return the reason."""
        await self._joined.wait()
        timeout_s = self._found.timeout_s + SLACK_S
        await self._wait(lambda: bool(self._attempt.over), timeout_s)
        return self._attempt.over or f"it did not end within {timeout_s:g} s"

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Read the log until `condition` holds for the attempt, for at most `timeout_s`."""
        deadline_s = monotonic() + timeout_s
        while not condition() and monotonic() < deadline_s:
            await self._calls(self._log.wait, lambda _: condition(), LOOK_S)

    async def _append(self, entry: Mapping[str, Any]) -> None:
        await self._calls(self._log.append, {**entry, "attempt": self._index})

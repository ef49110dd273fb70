"""The operator's orders to single workers."""

from enum import StrEnum

from rollq.buffer.core import BufferCore

_ORDER_MOVED = -1
"""The reply of the function when a worker has got another order since its caller read it."""


class Order(StrEnum):
    """The order that one worker has."""

    RUN = "run"
    PAUSE = "pause"  # lease nothing more
    DRAIN = "drain"  # lease nothing more, and stop when what is held has ended


class Steering(BufferCore):
    """Calls that steer single workers."""

    def order_worker(self, worker: str, order: Order) -> None:
        """Give an order to the worker that reports as `worker`; it follows within a second or two."""
        moved = True
        while moved:
            seen = self.send("HGET", self.keys.orders, worker) or b""
            moved = self.call("order_worker", self.keys.info, self.incarnation, worker, order, seen) == _ORDER_MOVED

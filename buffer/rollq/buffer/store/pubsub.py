"""Wake-ups over pub/sub. These only shorten waits: losing one delays the waiting role by at most one poll."""

import random
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from redis import exceptions as driver
from redis.client import PubSub

from rollq.buffer.store.connection import Patience
from rollq.buffer.store.servers import Servers

OF_THE_RUN = b""
"""The message for an event in the whole run. The message for an event in a task is the task's key prefix."""


class EventKind(StrEnum):
    """The kinds of wake-ups, named after their events."""

    ADMIT = "admit"  # groups became pending
    BATCH = "batch"  # a batch of groups began or ended
    CLAIM = "claim"
    COMMIT = "commit"
    COMPLETED = "completed"  # results were put, all of them as completed
    CONTROL = "control"  # a task's control or sleep changed
    EXPIRE = "expire"
    LEND = "lend"  # samples were offered to other workers
    PUBLISH = "publish"  # other weights are live
    PUT = "put"  # results were put, not all of them as completed
    RELEASE = "release"
    RETURNED = "returned"  # a loan of samples ended
    WORKER = "worker"  # a worker's state changed


class Events:
    """A subscription to a run's channels, one for each kind; use it in `with`, from one thread."""

    def __init__(
        self,
        servers: Servers,
        channels: str,
        patience: Patience,
        kinds: Collection[EventKind],
        task_prefix: str | None,
        others: Mapping[str, Callable[[Any], object]],
    ) -> None:
        """Subscribe to a run's channels.

        `channels` is their common name, without the kind. `kinds` lists the kinds that wake; empty means all. Only
        events in the whole run and in the task with the key prefix `task_prefix` count; None means all tasks. `others`
        maps other channels' names to functions that are called with each message there; these messages wake nobody.
        """
        self._servers = servers
        self._channels = [channel_of(channels, kind) for kind in kinds or EventKind]
        self._origins = None if task_prefix is None else (task_prefix.encode(), OF_THE_RUN)
        self._others = dict(others)
        self._patience = patience
        self._pubsub: PubSub | None = None

    def __enter__(self) -> Self:
        self._servers.patiently(self._subscribe, self._patience)
        return self

    def _subscribe(self) -> PubSub:
        """Listen to any of the servers: in a cluster, each server gets all messages."""
        client = random.choice(self._servers.primaries())
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(*self._channels, **self._others)
        return self._pubsub

    def _unsubscribe(self) -> None:
        if self._pubsub:
            self._pubsub.close()
        self._pubsub = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()

    def wait(self, timeout_s: float) -> bool:
        """Block until something has happened since the last wait, or for `timeout_s`; returns whether something has.
        While the server is unreachable, the call sleeps, and the next wait subscribes again.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                pubsub = self._pubsub or self._subscribe()
                message = pubsub.get_message(timeout=left_s)
                if message is not None and (self._origins is None or message["data"] in self._origins):
                    _drain(pubsub)
                    return True
            except (driver.ConnectionError, driver.TimeoutError, OSError):
                self._unsubscribe()
                time.sleep(min(0.25, max(0.0, deadline - time.monotonic())))
        return False


def channel_of(channels: str, kind: EventKind) -> str:
    """The channel for one kind of wake-ups. `channels` is the channels' common name, without the kind."""
    return f"{channels}:{kind}"


def _drain(pubsub: PubSub) -> None:
    """Discard further messages that have arrived: the caller checks the buffer once for all of them."""
    while pubsub.get_message(timeout=0) is not None:
        pass

"""Watchers share a reading; one that does not read is dropped, and nothing is kept for it."""

import asyncio
from typing import Any

from rollq.monitor.dashboard.events import Events


class Watcher:
    """One connection: what it was sent. While `blocked` is set, it reads nothing."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.blocked = False
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.blocked:
            await asyncio.Event().wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


async def until(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0.01)


def test_all_watchers_share_a_reading_and_leave_when_they_like() -> None:
    async def play() -> None:
        readings = 0

        def read() -> bytes:
            nonlocal readings
            readings += 1
            return b"data: %d\n\n" % readings

        events, watchers = Events(read), [Watcher() for _ in range(20)]
        answers = [asyncio.create_task(events({}, one.receive, one.send)) for one in watchers]
        await until(lambda: all(one.sent for one in watchers))
        assert {one.sent[0] for one in watchers} == {b"data: 1\n\n"}
        for one in watchers[1:]:
            one.gone.set()
        await asyncio.gather(*answers[1:])
        assert not answers[0].done()
        events.stop()
        await answers[0]
        assert watchers[0].sent[-1] == b""

    asyncio.run(play())


def test_a_watcher_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    async def play() -> None:
        events, slow, quick = Events(lambda: b"data: 1\n\n", slow_s=0.05), Watcher(), Watcher()
        answers = [asyncio.create_task(events({}, one.receive, one.send)) for one in (slow, quick)]
        await until(lambda: slow.sent and quick.sent)
        slow.blocked = True
        await answers[0]
        assert len(slow.sent) == 1
        assert not answers[1].done()
        events.stop()
        await answers[1]

    asyncio.run(play())

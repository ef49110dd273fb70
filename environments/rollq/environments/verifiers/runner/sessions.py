"""Takes sessions from a gateway, and ends them."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from rollq.environments.verifiers.runner.outcomes import Outcome, failure

WAIT_S = 30.0
"""How long a request for a session waits on the gateway."""
PAUSE_S = 2.0
"""Pause between requests to a gateway that does not answer."""
TRIES = 5
"""How many times an outcome is sent before the runner gives up."""

Play = Callable[[Mapping[str, Any]], Awaitable[Outcome]]


class Refused(Exception):
    """The gateway refuses the key."""


class Sessions:
    """Sessions of one gateway, for programs with the gateway's key."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, tasks: Sequence[str]) -> None:
        self._http, self._url = http, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {"wait_s": WAIT_S, **({"tasks": list(tasks)} if tasks else {})}

    async def work(self, play: Play, concurrent: int) -> None:
        """Play up to `concurrent` sessions at a time, until cancelled. Raises `Refused`."""
        places = asyncio.Semaphore(concurrent)
        playing: set[asyncio.Task[None]] = set()
        while True:
            await places.acquire()
            session = await self._take()
            task = asyncio.create_task(self._play(play, session))
            playing.add(task)
            task.add_done_callback(playing.discard)
            task.add_done_callback(lambda _: places.release())

    async def _take(self) -> Mapping[str, Any]:
        """The next session."""
        while True:
            try:
                async with self._http.post(f"{self._url}/sessions", json=self._body, headers=self._headers) as answer:
                    if answer.status == 200:
                        session: Mapping[str, Any] = await answer.json()
                        return session
                    text = await answer.text()
                    if answer.status not in (429, 503):
                        raise Refused(f"{self._url} returned no session: status {answer.status}: {text[:500]}")
                    pause_s = 0.0 if "no_session" in text else PAUSE_S
            except (aiohttp.ClientError, TimeoutError) as error:
                print(f"{self._url} cannot be reached: {error}", file=sys.stderr, flush=True)
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s)

    async def _play(self, play: Play, session: Mapping[str, Any]) -> None:
        try:
            path, body = await play(session)
        except Exception as error:  # noqa: BLE001 - an error of an episode fails its sample alone
            path, body = failure("program", f"{type(error).__name__}: {error}")
        await self._send(session, path, body)

    async def _send(self, session: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> None:
        """Send the outcome. If the gateway refuses it, send a failure; a session that is over needs no outcome."""
        headers = {"Authorization": f"Bearer {session['reward_token']}"}
        for left in range(TRIES, 0, -1):
            try:
                async with self._http.post(session["session_url"] + path, json=body, headers=headers) as answer:
                    text = await answer.text()
                    is_wrong = answer.status == 400 and "session_over" not in text
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(PAUSE_S)
                continue
            if is_wrong and path == "/reward" and left > 1:
                path, body = failure("grader", f"the worker refused the reward: {text}")
                continue
            return

"""A server that speaks OpenEnv's wire as recorded from the real one: guess a number, which is the task's index.

It runs in the event loop of the test, or in a thread beside it.
"""

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from rollq.buffer.common.ports import free_port
from support.waiting import PATIENCE_S

EXCHANGES: dict[str, Any] = json.loads(Path(__file__).with_name("openenv_exchanges.json").read_text())


class PlayedOpenEnv:
    """The server. `places` sessions at a time; `silent` sessions answer nothing from their first step on, not even
    pings. `opens`, if it is set, is the hint of every opening. `shift` is added to the number that is right."""

    def __init__(self, places: int = 64, tasks: int | None = 40, *, tools: bool = False) -> None:
        self.places, self.tasks, self.tools = places, tasks, tools
        self.silent = False
        self.opens = ""
        self.shift = 0
        self.seen: list[dict[str, Any]] = []
        self.sessions: set[web.WebSocketResponse] = set()
        self.most = self.refused = self.pongs = 0
        self.port = free_port("127.0.0.1")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["PlayedOpenEnv"]:
        """Serve in this event loop."""
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/list_environments", self._named)
        app.router.add_get("/guess/splits", self._splits)
        app.router.add_post("/guess/{route}", self._tasks)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            self.lose_sockets()
            await runner.cleanup()

    @contextmanager
    def beside(self) -> Iterator["PlayedOpenEnv"]:
        """Serve in a thread."""
        ready, stop = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            async with self.serving():
                loops.append(asyncio.get_running_loop())
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield self
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join(PATIENCE_S)

    def lose_sockets(self) -> None:
        """Cut all connections, as a server that is killed."""
        for session in list(self.sessions):
            writer = session._writer
            if writer is not None:
                writer.transport.abort()

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        if len(self.sessions) >= self.places:
            self.refused += 1
            await socket.send_json(EXCHANGES["capacity"])
            await socket.close()
            return socket
        self.sessions.add(socket)
        self.most = max(self.most, len(self.sessions))
        number = 0
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    self.pongs += message.type is WSMsgType.PONG
                    if message.type is WSMsgType.PING and not self.silent:
                        await socket.pong(message.data)
                    continue
                asked = json.loads(message.data)
                self.seen.append(asked)
                if asked["type"] == "close":
                    break
                if asked["type"] == "reset":
                    number = asked["data"].get("index", 0) % 10 + self.shift
                    await socket.send_json(self._opening(asked["data"]))
                elif not self.silent:
                    await socket.send_json(self._answer(asked["data"], number))
        finally:
            self.sessions.discard(socket)
        await socket.close()
        return socket

    def _opening(self, data: Mapping[str, Any]) -> Any:
        if self.tools:
            return EXCHANGES["reset_shop"]
        opening = copy.deepcopy(EXCHANGES["reset"])
        hint = f"task {data.get('index', 0)}: guess a number from 0 to 9 ({data['seed']})"
        opening["data"]["observation"]["hint"] = self.opens or hint
        return opening

    def _answer(self, action: Mapping[str, Any], number: int) -> Any:
        if action.get("type") == "list_tools":
            return EXCHANGES["list_tools"]
        if action.get("type") == "call_tool":
            if action["tool_name"] != "buy":
                return EXCHANGES["unknown_tool"]
            return EXCHANGES["call" if action["arguments"]["item"] == "apples" else "failed_call"]
        guess = str(action.get("guess", ""))
        if not guess.isdecimal():
            return EXCHANGES["invalid"]
        return EXCHANGES["broken" if int(guess) > 9 else "right" if int(guess) == number else "step"]

    async def _schema(self, _request: web.Request) -> web.Response:
        return web.json_response({"action": EXCHANGES["tool_schema" if self.tools else "schema"]})

    async def _named(self, _request: web.Request) -> web.Response:
        return web.json_response(["guess"])

    async def _splits(self, _request: web.Request) -> web.Response:
        return web.json_response([{"name": "train", "type": "train"}, {"name": "test", "type": "test"}])

    async def _tasks(self, request: web.Request) -> web.Response:
        if self.tasks is None:
            return web.json_response({"detail": "num_tasks is not supported for this environment"}, status=501)
        asked = await request.json()
        if request.match_info["route"] == "num_tasks":
            return web.json_response({"num_tasks": self.tasks})
        indices = range(self.tasks)[asked["start"] : asked["stop"]]
        return web.json_response({"tasks": [{"name": f"{asked['split']} {index}"} for index in indices]})

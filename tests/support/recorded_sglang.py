"""A server on loopback, in a thread, that answers as SGLang did when its exchanges were recorded."""

import asyncio
import json
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from aiohttp import web

from rollq.workers.engines.sglang.generate_api import PROBE
from support.serving import serving
from support.waiting import PATIENCE_S

EXCHANGES: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_exchanges.json").read_text())
STREAM = EXCHANGES["stream"]["events"]


class RecordedServer:
    """Answers requests for completions by the exchanges that `plan` names, "stream" when it is empty.

    "500" and other numbers are statuses; "broken" ends a stream after its first event, "hang" waits after it until the
    client has gone. The server keeps `weight_version`, as SGLang does, and names it in its answers.
    """

    def __init__(self) -> None:
        self.plan: deque[str] = deque()
        self.weight_plan: deque[str] = deque()  # of updates from disk, "loaded" when it is empty
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.weight_version = "default"
        self.paused = False
        self.top_nats = 0.0  # added to logprobs that identify the weights
        self.prompt_logprob: float | None = -0.5  # of each token of a prompt
        self.info = dict(EXCHANGES["server_info"]["answer"])
        self.probe = EXCHANGES["probe"]["answer"]
        self.hanging, self.freed = threading.Semaphore(0), threading.Semaphore(0)
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "RecordedServer":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/server_info", self._describe)
        app.router.add_get("/model_info", self._describe)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{route}", self._change)
        async with serving(app, handler_cancellation=True, shutdown_timeout=0.1) as self.url:
            self._ready.set()
            await self._stop.wait()

    def restart(self) -> None:
        """As a server that was started again."""
        self.weight_version, self.paused = "default", False

    async def _describe(self, request: web.Request) -> web.Response:
        self.calls.append(request.path[1:])
        if request.path == "/server_info":
            return web.json_response(self.info)
        return web.json_response({**EXCHANGES["model_info"]["answer"], "weight_version": self.weight_version})

    async def _change(self, request: web.Request) -> web.Response:
        """A route that changes the server's weights or holds requests back."""
        body, call = await request.json(), request.match_info["route"]
        if call == "update_weights_from_disk":
            assert self.paused
            word = self.weight_plan.popleft() if self.weight_plan else "loaded"
        else:
            words = {"update_weight_version": "named", "pause_generation": "paused", "continue_generation": "continued"}
            word = words[call]
            self.weight_version = body.get("new_version", self.weight_version)
            self.paused = {"named": self.paused, "paused": True, "continued": False}[word]
        recorded = EXCHANGES[word]
        assert body.keys() == recorded["request"].keys()
        self.calls.append(" ".join([call, *map(str, body.values())]))
        return web.json_response(recorded["answer"], status=recorded["status"])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert not self.paused
        if "logprob_start_len" in body:
            return web.json_response(self._score(body))
        if body["input_ids"] == PROBE.prompt_ids.tolist():
            return web.json_response(self._check(body))
        self.bodies.append(body)
        word = self.plan.popleft() if self.plan else "stream"
        if word.isdigit():
            return web.Response(status=int(word), text=f"said {word}")
        return await self._stream(word, request)

    def _score(self, body: dict[str, Any]) -> Any:
        """As in the exchange `scores`, with other logprobs."""
        recorded = EXCHANGES["scores"]
        assert recorded["request"].keys() <= body.keys()
        assert recorded["request"]["sampling_params"].items() <= body["sampling_params"].items()
        first, *rest = body["input_ids"]
        entries = [[None, first, None], *([self.prompt_logprob, token, None] for token in rest)]
        info = {**recorded["answer"]["meta_info"], "input_token_logprobs": entries}
        return {**recorded["answer"], "meta_info": info}

    def _check(self, body: dict[str, Any]) -> Any:
        """The answer to a request that checks the server."""
        if not body.get("top_logprobs_num"):
            return self.probe
        answer = orjson.loads(orjson.dumps(EXCHANGES["fingerprint"]["answer"]))
        for entry in answer["meta_info"]["output_top_logprobs"][0]:
            entry[0] += self.top_nats
        return answer

    async def _stream(self, word: str, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in EXCHANGES.get(word, EXCHANGES["stream"])["events"]:
            sent = orjson.loads(orjson.dumps(event))
            if "meta_info" in sent:
                sent["meta_info"]["weight_version"] = self.weight_version
            await response.write(b"data: " + orjson.dumps(sent) + b"\n\n")
            if word == "broken":
                return response
            if word == "hang":
                await self._hang()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _hang(self) -> None:
        self.hanging.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.freed.release()
            raise

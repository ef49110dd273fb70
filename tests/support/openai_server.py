"""A server with OpenAI's completions API on loopback, in a thread, which misbehaves as the test tells it to."""

import asyncio
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from rollq.workers.engines.openai.completions_api import PROBE
from support.serving import serving
from support.waiting import PATIENCE_S

ANSWER = [*b"42", 1]


class CompletionsServer:
    """Answers each request by the next word of `plan`, "ok" when it is empty.

    Requests with the ids of `PROBE` take their words from `probe_plan`, so that a test says what its own requests meet.
    """

    def __init__(self, *plan: str) -> None:
        self.plan = deque(plan)
        self.probe_plan: deque[str] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 64}]}
        self.retry_after = "0"
        self.fingerprint = -0.5  # largest logprob of the weights that it serves
        self.prompt_logprob: float | None = -0.5  # of each token of a prompt; None: it does not say
        self.longest_prompt = 64  # whose logprobs it does not refuse
        self.dtype: str | None = "float32"  # None: it does not say
        self.sequences: int | None = 32  # likewise
        self.plan_of_first: deque[str] = deque()  # of the sample that comes first, known by its seed
        self.priorities = True  # whether it takes any
        self.weight_routes = False
        self.weight_version = "default"
        self.weight_calls: list[str] = []  # that did not fail
        self.loaded: Any = None
        self.weight_plan: deque[str] = deque()  # of calls that load or check weights
        self.hanging = threading.Semaphore(0)
        self.freed = threading.Semaphore(0)
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "CompletionsServer":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, if it still runs."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        self._loop, self._stop, self._release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/weight_info", self._weights)
        app.router.add_post("/{route:pause|resume|update_weight_version|collective_rpc}", self._weights)
        async with serving(app, handler_cancellation=True, shutdown_timeout=0.1) as url:
            self.url = f"{url}/v1"
            self._ready.set()
            await self._stop.wait()

    def release(self) -> None:
        """Let requests that hang be answered."""
        self._loop.call_soon_threadsafe(self._release.set)

    async def _weights(self, request: web.Request) -> web.Response:
        """vLLM's development routes."""
        if not self.weight_routes:
            raise web.HTTPNotFound
        if request.method == "GET":
            self.weight_calls.append("weight_info")
            return web.json_response({"weight_version": self.weight_version})
        route = request.match_info["route"]
        body = await request.json() if request.can_read_body else {}
        if route == "update_weight_version":
            self.weight_version = body["new_version"]
        if route == "collective_rpc":
            route = body["method"]
            if route == "rollq_dtype":
                return web.json_response({"results": [self.dtype]}) if self.dtype else web.Response(status=500)
            if route == "rollq_max_sequences":
                return web.json_response({"results": [self.sequences]}) if self.sequences else web.Response(status=500)
            word = self.weight_plan.popleft() if self.weight_plan else "ok"
            if word.isdigit():
                return web.Response(status=int(word), text=f"said {word}")
            self.loaded = body["args"]
        self.weight_calls.append(f"{route} {self.weight_version}" if route == "update_weight_version" else route)
        return web.json_response({"results": [None]})

    async def _models(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        return web.json_response(self.models)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "priority" in body and not self.priorities:
            return web.Response(status=400, text="priorities are off")
        if "prompt_logprobs" in body:
            return self._score(body["prompt"])
        probe = body["prompt"] == PROBE.prompt_ids.tolist()
        plan = self.probe_plan if probe else self.plan
        word = plan.popleft() if plan else "ok"
        if not probe:
            self.bodies.append(body)
            if body["seed"] == self.bodies[0]["seed"] and self.plan_of_first:
                word = self.plan_of_first.popleft()
        if word == "hang":
            self.hanging.release()
            try:
                await self._release.wait()
            except asyncio.CancelledError:
                self.freed.release()
                raise
        return await self._answer(word, body, request)

    def _score(self, prompt: list[int]) -> web.Response:
        if len(prompt) > self.longest_prompt:
            return web.Response(status=400, text="too long")
        if self.prompt_logprob is None:
            return web.json_response({"choices": [{"token_ids": [1]}]})
        logprob = self.prompt_logprob if np.isfinite(self.prompt_logprob) else None
        entries = [None, *({str(token): {"logprob": logprob}} for token in prompt[1:])]
        return web.json_response({"choices": [{"prompt_logprobs": entries}]})

    async def _answer(self, word: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if body["logprobs"] > 1:  # the fingerprint of the weights
            top = {str(index): self.fingerprint - index for index in range(body["logprobs"])}
            return web.json_response({"choices": [{"logprobs": {"top_logprobs": [top]}}]})
        if word == "drop":
            assert request.transport is not None
            request.transport.abort()
        if word.isdigit():
            headers = {"Retry-After": self.retry_after} if word in ("429", "503") else None
            return web.Response(status=int(word), text=f'{{"error": "said {word}"}}', headers=headers)
        if word == "garbage":
            return web.Response(text="<html>not json")
        ids = ANSWER[: body["max_tokens"]]
        raw = word == "raw"
        logprobs = [0.0 if body["top_k"] == 1 and not raw else -0.5] * len(ids)
        choice = {
            "token_ids": None if word == "no ids" else ids,
            "logprobs": {"token_logprobs": [None] * len(ids) if word == "no logprobs" else logprobs},
            "finish_reason": "abort" if word == "abort" else "stop",
        }
        if not body.get("stream"):
            return web.json_response({"choices": [choice]})
        return await self._stream(word, choice, request)

    async def _stream(self, word: str, choice: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """The answer token by token; "stall" hangs after the first two, "break" ends there, "error 500" tells that."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        error = word.removeprefix("error ") if word.startswith("error") else None
        logprobs = choice["logprobs"]["token_logprobs"]
        for index in range(len(logprobs)):
            if error is not None and index == 1:
                code = int(error) if error.isdigit() else error
                await response.write(b"data: " + orjson.dumps({"error": {"message": "told", "code": code}}) + b"\n\n")
                break
            if word in ("stall", "break") and index == 2:
                if word == "break":
                    return response
                self.hanging.release()
                await self._release.wait()
            last = index == len(logprobs) - 1
            event = {
                "token_ids": None if choice["token_ids"] is None else [choice["token_ids"][index]],
                "logprobs": {"token_logprobs": [logprobs[index]]},
                "finish_reason": choice["finish_reason"] if last and word != "no reason" else None,
            }
            if word == "long" and index == 0:
                event["prompt_token_ids"] = [123_456] * 100_000
            await response.write(b"data: " + orjson.dumps({"choices": [event]}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


if __name__ == "__main__":  # in a process of its own, which can be stopped
    with CompletionsServer() as served:
        served.weight_routes = True
        print(served.url, flush=True)
        sys.stdin.read()

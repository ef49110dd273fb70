"""The protocols of the gateway over HTTP on loopback, in a thread, with answers that the test gives."""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from aiohttp import web

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.gateway.calls import Answer, Call, CallProtocol, CallRefused
from rollq.workers.gateway.protocols import chat, completions, messages, models, responses
from support.serving import serving
from support.waiting import PATIENCE_S

CREATED_S = 1_750_000_000
PROTOCOLS: Mapping[str, CallProtocol] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


def canned(content: str = "", *calls: ToolCall, reasoning: str | None = None, **others: Any) -> Answer:
    """An answer of 7 tokens, 3 of them thoughts, to a prompt of 11."""
    finish = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    plain = Answer(0, content, reasoning, calls, finish, None, 11, 7, 3 if reasoning else 0, CREATED_S)
    return replace(plain, **others)


@dataclass(frozen=True)
class Received:
    """A request as it came."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    call: Call


class CannedGateway:
    """Answers each call by the next of `plan`, in whatever protocol it is asked: an answer, which is numbered, a
    refusal, which ends a stream that has started if its status is 200, or the events of a stream."""

    def __init__(self, *plan: Answer | CallRefused | bytes) -> None:
        self.plan = deque(plan)
        self.received: list[Received] = []
        self.answered = 0
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def calls(self) -> list[Call]:
        """The calls that could be parsed."""
        return [received.call for received in self.received]

    def __enter__(self) -> "CannedGateway":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        for path, protocol in PROTOCOLS.items():
            app.router.add_post(path, self._handler(protocol))
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        async with serving(app) as self.url:
            self._ready.set()
            await self._ended.wait()

    def _handler(self, protocol: CallProtocol) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                call, body = await self._parsed(protocol, request)
                answer = self.plan.popleft()
                if isinstance(answer, CallRefused) and answer.status != 200:
                    raise answer
            except CallRefused as refused:
                retry = {"Retry-After": str(refused.retry_after_s)} if refused.status in (429, 503) else {}
                return web.json_response(protocol.error(refused), status=refused.status, headers=retry)
            if isinstance(answer, Answer):
                answer = replace(answer, number=self.answered)
                self.answered += 1
                if not call.stream:
                    written = exact_json.dumps(protocol.answer(call, body, answer))
                    return web.Response(body=written, content_type="application/json")
                events = protocol.events(call, body, answer)
            else:
                events = iter([answer]) if isinstance(answer, bytes) else protocol.error_events(call, answer)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b": keepalive\n\n")
            for event in events:
                await response.write(event)
            await response.write_eof()
            return response

        return handle

    async def _parsed(self, protocol: CallProtocol, request: web.Request) -> tuple[Call, dict[str, Any]]:
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.json()
        call = protocol.parse(body, headers)
        self.received.append(Received(request.path_qs, headers, body, call))
        return call, body

    async def _count(self, request: web.Request) -> web.Response:
        call, _ = await self._parsed(messages, request)
        return web.json_response(messages.token_count(len(call.messages)))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models.model_list("policy", CREATED_S, 4096))

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(models.model(request.match_info["name"], CREATED_S, 4096))

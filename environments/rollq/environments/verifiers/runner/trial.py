"""Plays episodes with a model that always gives the same answer, for checks without a real model."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from glob import glob
from typing import Any

from aiohttp import web

from rollq.environments.verifiers.runner.episodes import Serving

SAID = "0"
AT_ONCE = 8
DEADLINE_S = 600.0
COMPLETION = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "rollq",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": SAID}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


async def tried(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each row's outcome, as `path`, `body` and `seconds`, and the number of remaining processes. Raises
    `SpecError`."""
    slots = asyncio.Semaphore(AT_ONCE)
    async with AsyncExitStack() as stack:
        url = await _serve(stack)
        serving = await Serving.start(spec, stack)

        async def play(row: Mapping[str, Any]) -> dict[str, Any]:
            session = {"metadata": row, "deadline_s": DEADLINE_S, "openai_base_url": url}
            async with slots:
                begun_s = time.monotonic()
                path, body = await serving.play(session)
                return {"path": path, "body": body, "seconds": time.monotonic() - begun_s}

        outcomes = await asyncio.gather(*map(play, rows))
    return {"outcomes": outcomes, "left": len(_children())}


async def _serve(stack: AsyncExitStack) -> str:
    """The base URL of the model, until `stack` is closed."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(COMPLETION)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


def _children() -> list[str]:
    """The processes that this process has started, if the system lists them."""
    texts = []
    for path in glob(f"/proc/{os.getpid()}/task/*/children"):
        with open(path) as file:
            texts += file.read().split()
    return texts

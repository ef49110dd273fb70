"""The time that the gateway adds to a call, with many sessions: HTTP, parsing, the history, tokenising and recording.

The gateway, an engine that answers at once, and the calls of the buffer are in this process, as in a worker; server and
clients are separate processes. Calls start at a steady rate, even if the gateway is slow, and continue a session's
conversation. `python -m benchmarks.gateway` is the clients' process.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from benchmarks.results import Result
from benchmarks.world import admit_and_lease, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, FinishReason, Lease, VersionSpan
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.loops import Rollout
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import freeze_heap
from rollq.workers.engines.protocol import Completion, Request, Sampling
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.salvage import Salvage
from rollq.workers.settings import GatewaySettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer

GROUP_SIZE = 8
PROMPT_TOKENS = 200_000
ANSWER = "The tests pass now. " * 5
BARE_S = 15
"""Seconds for which a server that does nothing is measured for comparison."""
RESULT_CHARACTERS = 1000
"""Text that each call adds to its conversation."""


def measure(quick: bool) -> list[Result]:
    """Two results for each size of a conversation: the median and the 99th percentile of calls that continue it."""
    sessions, rate, seconds = (16, 20, 3) if quick else (1000, 100, 60)
    return [result for kilobytes in (4, 80) for result in _measure(sessions, rate, seconds, kilobytes)]


def _measure(sessions: int, rate: int, seconds: int, kilobytes: int) -> list[Result]:
    rules = TaskRules(batch_groups=sessions, group_size=GROUP_SIZE, partial_rollout=True, max_staleness=1000)
    with TemporaryDirectory(prefix="rollq-bench-") as name, server() as redis:
        _write_tokenizer(Path(name))
        with run(redis.url, "gateway", rules) as (buffer, held):
            leases = admit_and_lease(buffer, held.epoch, 0, -(-sessions // GROUP_SIZE), 0)
            plan = {"rate": rate, "seconds": seconds, "characters": kilobytes * 1000}
            times = asyncio.run(_serve(buffer, leases, HfTokenizer(Path(name)), plan))
    bare = asyncio.run(_serve_bare(sessions, {**plan, "seconds": min(seconds, BARE_S)}))
    continuing, openings = np.array(times["continuing"]) * 1e3, np.array(times["openings"]) * 1e3
    details = {
        "bare_http_median_ms": float(np.median(bare["continuing"])) * 1e3,
        "calls": float(len(continuing)),
        "opening_median_ms": float(np.median(openings)),
        "opening_p99_ms": float(np.percentile(openings, 99)),
        "max_ms": float(continuing.max()),
    }
    what = f"added to a call that continues {kilobytes} kB, {sessions} sessions, {rate} calls/s"
    return [
        Result(
            name=f"gateway_{kilobytes}kb_{name}",
            what=f"{name} {what}",
            unit="ms",
            target=target,
            better="lower",
            values=(float(value),),
            details=details,
        )
        for name, target, value in (
            ("median", 2.0, np.median(continuing)),
            ("p99", 10.0, np.percentile(continuing, 99)),
        )
    ]


def _write_tokenizer(folder: Path) -> None:
    from rollq.cli.demo.tiny_model import make_tokenizer  # torch: most benchmarks do without

    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)


async def _serve(
    buffer: Buffer, leases: Sequence[Lease], tokenizer: HfTokenizer, plan: dict[str, Any]
) -> dict[str, list[float]]:
    """Serve a session for each sample of the leases, and return what the clients have measured."""
    calls = BufferCalls(buffer)
    salvage = Salvage(calls)
    gateway = Gateway(GatewaySettings())
    http = Server(gateway)
    await http.start()
    freeze_heap()  # as a worker does when its engine has started
    ids = np.array([*tokenizer.encode(ANSWER), 1], np.int32)
    made = Completion(ids, np.full(len(ids), -0.5, np.float32), (VersionSpan(1, 0, len(ids)),), FinishReason.STOP)

    async def generate(_request: Request) -> Completion:
        return made

    with ExitStack() as stack:
        bases = []
        for lease in leases:
            held = HeldLease(lease, 0.0, 0.0)
            for index in range(GROUP_SIZE):
                rollout = Rollout(
                    prompt=lease.prompt,
                    prompt_ids=np.zeros(1, np.int32),
                    previous=EMPTY_SAMPLE,
                    sampling=Sampling(PROMPT_TOKENS, 1.0, seed=index),
                    max_prompt_tokens=PROMPT_TOKENS,
                    priority=0,
                    tokenizer=tokenizer,
                    generate=generate,
                    record=salvage.of(held, index, EMPTY_SAMPLE, recorded=True).record,
                )
                session = Session(rollout, make_format("hermes"), SessionLimits(max_calls=10_000))
                bases.append(gateway.base_url(stack.enter_context(gateway.serving(session))))
        times = await _ask({**plan, "bases": bases})
    await http.close()
    calls.close()
    return times


async def _serve_bare(sessions: int, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Serve as many sessions with a server that only reads each request and answers."""
    answer = orjson.dumps({"choices": [{"message": {"role": "assistant", "content": ANSWER}}]})

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=16_000_000)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    times = await _ask({**plan, "bases": [f"http://{host}:{port}/s/{number}" for number in range(sessions)]})
    await runner.cleanup()
    return times


async def _ask(plan: dict[str, Any]) -> dict[str, list[float]]:
    """Have the clients' process follow the plan, and return what it has measured."""
    command = [sys.executable, "-m", "benchmarks.gateway"]
    clients = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    output, _ = await clients.communicate(orjson.dumps(plan))
    times: dict[str, list[float]] = orjson.loads(output)
    return times


async def _clients(plan: dict[str, Any]) -> dict[str, list[float]]:
    """Open every session, then continue them in turn, at the planned rate; returns the seconds of each call."""
    opening = "word " * (plan["characters"] // 5)
    history: dict[str, list[dict[str, str]]] = {
        base: [{"role": "user", "content": f"{place} {opening}"}] for place, base in enumerate(plan["bases"])
    }
    times: dict[str, list[float]] = {"openings": [], "continuing": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(base: str, kind: str) -> None:
            body = orjson.dumps({"model": "rollq", "messages": history[base]})
            started_s = time.perf_counter()
            async with http.post(f"{base}/v1/chat/completions", data=body) as answer:
                read = await answer.read()
            times[kind].append(time.perf_counter() - started_s)
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {read[:200]!r}")
            result = {"role": "user", "content": "r" * RESULT_CHARACTERS}
            history[base] += [orjson.loads(read)["choices"][0]["message"], result]

        for base in plan["bases"]:
            await ask(base, "openings")
        started_s, asking = time.perf_counter(), list[asyncio.Task[None]]()
        for number in range(int(plan["rate"] * plan["seconds"])):
            await asyncio.sleep(max(0.0, started_s + number / plan["rate"] - time.perf_counter()))
            asking.append(asyncio.create_task(ask(plan["bases"][number % len(plan["bases"])], "continuing")))
        await asyncio.gather(*asking)
    return times


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(asyncio.run(_clients(orjson.loads(sys.stdin.buffer.read())))))

"""Sessions one after another, from one program elsewhere: nothing of them stays with the worker."""

import asyncio
import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Prompt, VersionSpan
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.gateway.harnesses.remote import outside_loop
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, Model, chat_tokenizer, rollout
from support.gateway_calls import run
from support.served_gateway import BODY, listening

PROGRAMS = 16
KEY = {"Authorization": "Bearer key"}


@dataclass
class Counts:
    """What a process holds."""

    files: int
    tasks: int
    sessions: int
    objects: int

    @classmethod
    def of(cls, gateway: Gateway) -> "Counts":
        gc.collect()
        sessions = len(gateway._sessions) + len(gateway._outcomes) + len(gateway.offers._waiting)
        return cls(len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), sessions, len(gc.get_objects()))


async def answer(request: Request) -> Completion:
    """The model's answer, which nobody keeps."""
    ids = np.array([70, 71, EOS], np.int32)
    return Completion(ids, np.zeros(3, np.float32), (VersionSpan(1, 0, 3),), FinishReason.STOP)


async def use_sessions(http: aiohttp.ClientSession, url: str) -> None:
    """Take one session after another; a third of them fail, and a third are left to the judge."""
    for number in range(1_000_000):
        async with http.post(f"{url}/sessions", json={"tasks": ["sums"], "wait_s": 30}, headers=KEY) as response:
            if response.status != 200:
                return
            offered = await response.json()
        async with http.post(f"{offered['openai_base_url']}/chat/completions", json=BODY) as response:
            assert response.status == 200
        right = {"Authorization": f"Bearer {offered['reward_token']}"}
        ways = (("reward", {"reward": 1.0, "turns": [1.0]}), ("reward", {"reward": None}), ("fail", FAILURE))
        route, body = ways[number % 3]
        async with http.post(f"{offered['session_url']}/{route}", json=body, headers=right) as response:
            assert response.status == 200


FAILURE = {"kind": "environment", "reason": "lost"}


@pytest.mark.parametrize("sessions", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_sessions_leave_nothing_behind(sessions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")

    async def make(gateway: Gateway, tokenizer: HfTokenizer, number: int) -> None:
        made = replace(rollout(Model(tokenizer, []), Prompt(f"Say {number}")), generate=answer, task="sums")
        sample = await outside_loop(gateway, tool_parser="").run(made)
        assert (sample.failure, sample.error) in ((None, None), (FailureKind.ENVIRONMENT, "lost"))

    async def make_many(gateway: Gateway, tokenizer: HfTokenizer, most: int) -> None:
        left = iter(range(most))

        async def one_after_another() -> None:
            for number in left:
                await make(gateway, tokenizer, number)

        await asyncio.gather(*(one_after_another() for _ in range(2 * PROGRAMS)))

    async def work() -> None:
        tokenizer = chat_tokenizer(tmp_path)
        async with listening() as (gateway, http):
            programs = [asyncio.create_task(use_sessions(http, gateway.url)) for _ in range(PROGRAMS)]
            await make_many(gateway, tokenizer, max(sessions // 4, 100))  # until caches and connections are there
            before = Counts.of(gateway)
            await make_many(gateway, tokenizer, sessions)
            after = Counts.of(gateway)
            gateway.offers.end_waits()
            await asyncio.gather(*programs)
        assert after.files <= before.files + 4
        assert after.tasks <= before.tasks + PROGRAMS
        assert after.sessions <= PROGRAMS
        assert after.objects <= before.objects + sessions  # a session that stays has more than one

    run(work)

"""Agents over the gateway with a real vLLM: the logprobs of every segment are those of a plain forward pass.

The session has a conversation, two subagents at the same time that continue one answer, and a history that is
compacted, over the chat and messages protocols, streamed and not.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Prompt, Sample
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.loops import Rollout, prompt_tokens
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Sampling
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.settings import GatewaySettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import FORGETFUL, PLAIN, chat_tokenizer
from support.vllm_run import forward_logprobs, make_qwen3, options, with_host

TEMPERATURE = 0.7
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


class Agent:
    """A client of one session."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self.http = http
        self.base = base

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Ask in chat completions, and return the messages with the answer."""
        body = {"model": "any", "messages": messages, "max_tokens": 24, **fields}
        async with self.http.post(f"{self.base}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        if fields.get("stream"):
            chunks = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
            return {"role": "assistant", "content": "".join(parts)}
        message: dict[str, Any] = orjson.loads(text)["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}

    async def messages(self, system: str, text: str) -> None:
        """Ask in Anthropic's messages."""
        body = {"model": "any", "max_tokens": 24, "system": system, "messages": [{"role": "user", "content": text}]}
        async with self.http.post(f"{self.base}/v1/messages", json=body) as answer:
            assert answer.status == 200, await answer.text()


async def use(agent: Agent) -> None:
    """One session, as agents have them."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "What is 6*7?"}]
    history.append(await agent.chat(history, tools=[TOOL]))
    history.append({"role": "user", "content": "Go on."})
    history.append(await agent.chat(history, tools=[TOOL], stream=True))
    await asyncio.gather(
        *(
            agent.chat([*history, {"role": "user", "content": f"Subtask {number}"}], tools=[TOOL])
            for number in range(2)
        ),
        agent.messages("You are a subagent.", "Look it up."),
    )
    summary = await agent.chat([*history, {"role": "user", "content": "Summarise."}])
    compacted = [{"role": "user", "content": f"So far: {summary['content']}"}]
    await agent.chat(compacted, tools=[TOOL])


@pytest.mark.parametrize("template", [PLAIN, FORGETFUL], ids=["plain", "forgetful"])
def test_every_segment_has_the_logprobs_of_a_plain_forward_pass(template: str, tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model", seed=3)
    tokenizer: HfTokenizer = chat_tokenizer(tmp_path / "tokenizer", template)
    found: list[Sample] = []

    async def scenario(host: EngineHost) -> None:
        prompt = Prompt("What is 6*7?")
        rollout = Rollout(
            prompt=prompt,
            prompt_ids=prompt_tokens(prompt, tokenizer),
            previous=EMPTY_SAMPLE,
            sampling=Sampling(max_tokens=1000, temperature=TEMPERATURE, seed=5),
            max_prompt_tokens=1000,
            priority=0,
            tokenizer=tokenizer,
            generate=host.generate,
            session="math/1/0/1",
        )
        session = Session(rollout, make_format("hermes"), SessionLimits())
        gateway = Gateway(GatewaySettings())
        server = Server(gateway)
        await server.start()
        async with aiohttp.ClientSession() as http:
            with gateway.serving(session) as token:
                await use(Agent(http, gateway.base_url(token)))
        await server.close()
        await session.settle()
        found.append(session.sample(extra={}))

    with_host(options(folder), scenario)
    (sample,) = found
    trained = 0
    for segment in sample.segments:
        ids = np.concatenate([segment.prompt_ids, segment.response_ids])
        again = forward_logprobs(folder, ids, TEMPERATURE)[len(segment.prompt_ids) - 1 :]
        mask = np.ones(len(again), np.bool_) if segment.loss_mask is None else segment.loss_mask
        np.testing.assert_allclose(again[mask], segment.logprobs[mask], atol=1e-3, rtol=0)
        trained += int(mask.sum())
    calls = sample.extra["calls"]
    assert len(calls) == 7
    assert trained == sum(call["tokens"] for call in calls) - sample.extra.get("left_out_tokens", 0)
    assert replace(sample, extra={}).reward is None

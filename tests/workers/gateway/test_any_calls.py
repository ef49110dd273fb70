"""Random agents: every token is trained at most once, after exactly the tokens that the engine was given for it."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import FinishReason, Int32Array, Sample, VersionSpan
from rollq.workers.agents.conversation import Message
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.gateway.calls import Answer, Call
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, FORGETFUL, PLAIN, Model, call, chat_tokenizer
from support.gateway_calls import CALCULATOR, as_message, as_stored, make_session, run, serve

TRIMMING = PLAIN.replace("message.content }}", "message.content | trim }}")
REFUSING = PLAIN.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('order') }}{% endif %}",
)
TEMPLATES = {"plain": PLAIN, "forgetful": FORGETFUL, "trimming": TRIMMING, "refusing": REFUSING}
PRODUCTS = [call("calculator", expression=f"{number}*7") for number in range(4)]
WORDS = (
    "Yes", " spaces around ", "two\nlines\n", "<think>Hm.</think>So", "<think>never closed", "", PRODUCTS[0],
    f"Look: {PRODUCTS[1]}{PRODUCTS[2]}", f"<think>a</think>{PRODUCTS[3]}", "<tool_call>broken</tool_call>",
    "Stop here. END",
)  # fmt: skip
CALLS = 30


@dataclass
class Spoken:
    """A model that says random words, each token with a logprob that no other one has."""

    tokenizer: HfTokenizer
    random: random.Random
    made: dict[float, tuple[Int32Array, Int32Array, int]] = field(default_factory=dict)

    async def generate(self, request: Request) -> Completion:
        ids = [*self.tokenizer.encode(self.random.choice(WORDS)), EOS]
        reason = FinishReason.STOP
        context = request.prompt_ids
        if request.prefix_ids is not None:
            context = np.concatenate([context, request.prefix_ids])
        if len(ids) > 3 and self.random.random() < 0.2:
            ids, reason = ids[:3], FinishReason.ABORT
        elif request.sampling.stop and self.tokenizer.decode(ids).endswith("END"):
            ids = ids[:-1]
        elif len(ids) > 3 and self.random.random() < 0.1:
            ids, reason = ids[:3], FinishReason.LENGTH
        logprobs = []
        for place in range(len(ids)):
            logprob = float(np.float32(-(len(self.made) + 1) / 64))
            self.made[logprob] = (context, np.array(ids, np.int32), place)
            logprobs.append(logprob)
        spans = (VersionSpan(1, len(self.made), len(ids)),)
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), spans, reason)


@dataclass
class Agent:
    """Asks a session at random: it continues any history that it has, opens new ones, asks again, and at once."""

    session: Session
    random: random.Random
    histories: list[tuple[Message, ...]] = field(default_factory=lambda: [()])
    texts: list[str] = field(default_factory=lambda: ["user: "])

    async def act(self) -> None:
        asked = [self.call() for _ in range(self.random.choice([1, 1, 1, 2, 4]))]
        answers = await asyncio.gather(*(serve(self.session, given) for given in asked))
        for given, answer in zip(asked, answers, strict=True):
            self.keep(given, answer)
            if self.random.random() < 0.2:
                self.keep(given, await serve(self.session, given))

    def keep(self, given: Call, answer: Answer) -> None:
        if given.text is not None:
            self.texts.append(given.text + answer.content)
        elif given.messages:
            self.histories.append((*given.messages, self.sent_back(answer)))

    def call(self) -> Call:
        stop = ("END",) if self.random.random() < 0.3 else ()
        if self.random.random() < 0.2:
            text = self.random.choice(self.texts) + self.random.choice(["", "", " and ", "x"])
            if self.random.random() < 0.3:
                return Call(model="m", ids=tuple(self.session.answering.rollout.tokenizer.encode(text)), stop=stop)
            return Call(model="m", text=text, stop=stop)
        history = self.random.choice(self.histories[-8:] if self.random.random() < 0.7 else self.histories)
        asked = self.changed((*history, *self.news(history)))
        tools = self.random.choice([(CALCULATOR,), (CALCULATOR,), ()])
        return Call(model="m", messages=asked, tools=tools, stop=stop)

    def news(self, history: tuple[Message, ...]) -> list[Message]:
        calls = history[-1].get("tool_calls", ()) if history else ()
        results: list[Message] = [{"role": "tool", "tool_call_id": made["id"], "content": "42"} for made in calls]
        self.random.shuffle(results)
        if results and self.random.random() < 0.7:
            return results
        if history and self.random.random() < 0.1:
            results.append({"role": "system", "content": "Be kind."})
        return [*results, {"role": "user", "content": self.random.choice(["Go on", " and ", "Why?\n", ""])}]

    def changed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if len(messages) > 3 and self.random.random() < 0.1:  # compacted
            return ({"role": "user", "content": "In short: yes"}, *messages[-1:])
        if self.random.random() < 0.1:
            return ({"role": "system", "content": "You are new."}, *messages)
        return messages

    def sent_back(self, answer: Answer) -> Message:
        message: dict[str, Any] = dict(as_message(answer))
        if answer.reasoning and self.random.random() < 0.5:
            message["reasoning_content"] = answer.reasoning
        if self.random.random() < 0.2:
            message["content"] = message["content"].strip()
        if answer.stop_text and self.random.random() < 0.5:
            message["content"] += answer.stop_text
        return message


def check(sample: Sample, spoken: Spoken) -> None:
    seen: set[float] = set()
    for segment in sample.segments:
        ids = np.concatenate([segment.prompt_ids, segment.response_ids])
        mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
        assert mask.any()
        assert sum(span.tokens for span in segment.versions) == len(segment.response_ids)
        for place in np.flatnonzero(mask).tolist():
            logprob = float(segment.logprobs[place])
            assert logprob not in seen
            seen.add(logprob)
            context, made, at = spoken.made[logprob]
            assert ids[: len(segment.prompt_ids) + place + 1].tolist() == [*context.tolist(), *made[: at + 1].tolist()]
    left_out = sum(fact["tokens"] for fact in sample.extra["calls"] if fact["left_out"])
    assert left_out == sample.extra.get("left_out_tokens", 0)
    assert len(seen) == sum(fact["tokens"] for fact in sample.extra["calls"]) - left_out
    assert len(seen) + left_out == len(spoken.made)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    return {name: chat_tokenizer(tmp_path_factory.mktemp(name), text) for name, text in TEMPLATES.items()}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_every_token_is_trained_once_after_the_tokens_that_led_to_it(
    template: str, seed: int, tokenizers: dict[str, HfTokenizer]
) -> None:
    tokenizer = tokenizers[template]
    spoken = Spoken(tokenizer, random.Random(f"model {seed}"))
    recorded: list[Sample] = []

    async def use(session: Session, agent_seed: str) -> None:
        session.answering.rollout = replace(session.answering.rollout, generate=spoken.generate)
        agent = Agent(session, random.Random(agent_seed))
        for _ in range(CALLS):
            await agent.act()

    lengths: dict[str, Any] = {"max_tokens": 100_000, "max_prompt_tokens": 100_000}
    session = make_session(Model(tokenizer, []), recorded=recorded, **lengths)
    run(partial(use, session, f"agent {seed}"))
    whole = session.sample(extra={})
    check(whole, spoken)

    made = len(spoken.made)
    again = make_session(Model(tokenizer, []), previous=as_stored(recorded), recorded=[], **lengths)
    run(partial(use, again, f"agent {seed}"))
    assert len(spoken.made) == made, "a replay samples nothing"
    replayed = again.sample(extra={})
    check(replayed, spoken)
    assert [segment.response_ids.tolist() for segment in replayed.segments] == [
        segment.response_ids.tolist() for segment in whole.segments
    ]

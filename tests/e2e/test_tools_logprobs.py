"""A real model that calls a tool, from the worker to the trainer's tensors: what is trained, and its logprobs.

The model is taught two things to say, so that its words are known; all else is as in training: a worker with the
transformers engine, the buffer, a batch.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Group, Prompt, SampleStatus, Status
from rollq.buffer.weights.store import locate_weights
from rollq.cli.demo.tiny_model import make_model, make_tokenizer, save
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.workers.agents.built_in_tools import calculator
from rollq.workers.run import Worker
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import FORGETFUL, PLAIN, call
from support.mcp_servers import command
from support.worker_run import Script, WorkerWorld

QUESTION = "6*7?"
CALL = call("calculator", expression="6*7")
START = f"tool calculator\nuser: {QUESTION}<eos>\nassistant: "
ANSWERS = ("It is 42", "42, I think")
STEPS = 90
GLUE = "\ntool: 42<eos>\nassistant: "
TASK: dict[str, Any] = {
    "group_size": 4,
    "max_tokens": 300,
    "temperature": 0.8,
    "agent_loop": "tools",
    "agent_options": {"tools": {"calculator": {"function": f"{__name__}.Desk"}}},
    "judge": "last_number",
}


def teach(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, lessons: Sequence[tuple[str, str]]) -> None:
    """Have a model say each second text after the first, those with the same first one as likely as each other."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, labels = [], []
    for given, said in lessons:
        prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (given, said))
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def taught(folder: Path, template: str, seed: int) -> Path:
    """A model that calls the calculator, after a thought where the template drops it, and gives one of two answers."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tiny = make_model(len(tokenizer), seed)
    thought = "<think>six</think>" if template is FORGETFUL else ""
    answers = [(f"{START}{CALL}<eos>{GLUE}", f"{answer}<eos>") for answer in ANSWERS]
    teach(tiny, tokenizer, [(START, f"{thought}{CALL}<eos>"), *answers])
    save(folder, tiny.eval(), tokenizer)
    return folder


@pytest.fixture(scope="module", params=[PLAIN, FORGETFUL], ids=["one_segment", "broken_prefix"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("model"), request.param, seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same words, of other weights."""
    return taught(tmp_path_factory.mktemp("other"), PLAIN, seed=1)


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url, TASK)


class Desk:
    """The calculator, while it is open."""

    open: asyncio.Event

    async def __call__(self, expression: str) -> str:
        """Work out an expression."""
        waits.append(expression)
        await Desk.open.wait()
        return calculator(expression)


waits: list[str] = []


def publish(world: WorkerWorld, version: int, model: Path) -> None:
    stored = locate_weights(world.buffer, model)
    world.buffer.publish(world.world.held, version, uri=stored.uri, digest=stored.digest)


def made(world: WorkerWorld, model: Path, then: Path | None = None) -> Group:
    """One group that a worker made. `then` are the weights that arrive when all its samples wait for their tool."""
    publish(world, 1, model)
    clock = world.buffer.clock("math")
    prompt = Prompt(QUESTION, answer="42")
    world.buffer.admit("math", [(prompt, 1)], epoch=clock.epoch, cursor=0, target=10, step=clock.step)
    world.tickets(1)
    waits.clear()

    async def scene(worker: Worker, script: Script) -> None:
        Desk.open = asyncio.Event()
        if then is not None:
            await world.until(lambda: len(waits) == TASK["group_size"])
            publish(world, 2, then)
            await world.until(lambda: worker.host.version is not None and worker.host.version.version == 2)
        Desk.open.set()
        await world.until(lambda: world.count(Status.COMPLETED) + world.count(Status.FAILED) == 1)

    world.play(scene, engine="transformers", options={"model": model, "device": "cpu"})
    claimed = world.world.claim(world.buffer.clock("math").step, math=1)
    [group] = world.buffer.fetch(claimed.groups)
    return group


def recomputed(folder: Path, micro: MicroBatch) -> torch.Tensor:
    """Logprobs float32 [B, T - 1] of all tokens but the first, by a plain forward pass of the saved model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=micro.input_ids, attention_mask=micro.attention_mask).logits[:, :-1]
    scaled = (logits / micro.temperature[:, 1:, None]).log_softmax(-1)
    return torch.gather(scaled, -1, micro.input_ids[:, 1:, None]).squeeze(-1)


@pytest.mark.long
@pytest.mark.parametrize("over_mcp", [False, True], ids=["function", "mcp"])
def test_every_token_of_a_conversation_that_is_trained_has_its_logprob_and_no_other_is(
    buffer: Buffer, server_url: str, model: Path, over_mcp: bool
) -> None:
    server = {"desk": {"mcp": command(), "only": ["calculator"]}}
    changed = {"agent_options": {"tools": server}} if over_mcp else {}
    group = made(WorkerWorld(buffer, server_url, TASK | changed), model)
    tokenizer = HfTokenizer(model)
    assert [sample.status for sample in group.samples] == [SampleStatus.COMPLETED] * 4
    turns = [
        f"{message['content']}<eos>"
        for sample in group.samples
        for message in sample.extra["messages"]
        if message["role"] == "assistant"
    ]
    assert len(turns) == 8

    batch = Batch.build(2, [group])
    [micro] = batch.micro_batches(10_000, padded=True)
    trained = micro.loss_mask[:, 1:]
    behaviour = micro.behaviour_logprobs[:, 1:]
    np.testing.assert_allclose(recomputed(model, micro)[trained], behaviour[trained], atol=1e-4, rtol=0)
    assert (micro.behaviour_logprobs[~micro.loss_mask] == 0).all()
    assert float(behaviour.min()) < -0.3  # which answer was left to chance, so the comparison means something

    sequences = [batch.sequences[index] for index in sorted(micro.sequences)]
    said = [tokenizer.decode(each.ids[each.loss_mask].tolist(), special=True) for each in sequences]
    assert "".join(said) == "".join(turns)
    assert batch.counts.loss_tokens == sum(len(tokenizer.encode(turn)) for turn in turns)
    for each in sequences:  # the environment's tokens too: their sample is not older for them
        assert set(each.versions.tolist()) == {-1, 1}
        assert not each.staleness.any()


def test_the_tokens_of_a_conversation_are_those_that_the_engine_went_on_from(world: WorkerWorld, model: Path) -> None:
    """Prompt, call, glue and answer; in two segments when the template forgets the thought."""
    tokenizer = HfTokenizer(model)
    segments = 0
    for sample in made(world, model).samples:
        call, answer = [each["content"] for each in sample.extra["messages"] if each["role"] == "assistant"]
        ids = [(each.prompt_ids.tolist(), each.response_ids.tolist()) for each in sample.segments]
        first, second = tokenizer.encode(f"{call}<eos>"), tokenizer.encode(f"{answer}<eos>")
        start = tokenizer.encode(START)
        segments += len(ids)
        if call.startswith("<think>"):
            assert ids == [(start, first), (tokenizer.encode(f"{START}{CALL}<eos>{GLUE}"), second)]
        else:
            assert ids == [(start, first + tokenizer.encode(GLUE) + second)]
    assert segments == (8 if "split" in (model / "chat_template.jinja").read_text() else 4)


@pytest.mark.long
def test_turns_before_and_after_a_swap_have_the_logprobs_of_their_own_weights(
    world: WorkerWorld, other: Path, tmp_path: Path
) -> None:
    model = taught(tmp_path / "model", PLAIN, seed=0)
    batch = Batch.build(3, [made(world, model, other)])
    [micro] = batch.micro_batches(10_000, padded=True)
    behaviour = micro.behaviour_logprobs[:, 1:]
    for version, folder in ((1, model), (2, other)):
        trained = micro.loss_mask[:, 1:] & (micro.versions[:, 1:] == version)
        assert trained.any(dim=1).all()
        np.testing.assert_allclose(recomputed(folder, micro)[trained], behaviour[trained], atol=1e-4, rtol=0)
    call = len(HfTokenizer(model).encode(f"{CALL}<eos>"))
    for sample in batch.samples:  # the tool's answer came after the swap, and makes nothing younger
        [first, second] = sample.segments[0].versions
        assert (first.version, first.tokens, second.version) == (1, call + len(GLUE) - len("<eos>") + 1, 2)

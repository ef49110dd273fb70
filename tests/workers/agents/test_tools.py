"""The loop `tools`: turns, tokens, masks, limits, and whose mistake costs what."""

import asyncio
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.put_args import versions_of
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus, Segment, Status, VersionSpan
from rollq.buffer.wire.parts import join_parts, rest_of
from rollq.buffer.wire.validation import check_group
from rollq.workers.agents.loops import AgentLoop, is_resumable
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.protocol import Completion, ContextFull, Request, Sampling
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.run import Worker
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, FORGETFUL, PAD, PLAIN, Model, call, chat_tokenizer, converse, rollout
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld

SUM = call("calculator", expression="6*7")


@pytest.fixture
def tokenizer(tmp_path: Path) -> HfTokenizer:
    return chat_tokenizer(tmp_path)


def tools(*names: str, each: dict[str, Any] | None = None, **options: Any) -> AgentLoop:
    """The loop with tools of this module, or built-in ones."""
    built_in = {"calculator", "lookup"}
    table = {name: (each or {}) | ({} if name in built_in else {"function": f"{__name__}.{name}"}) for name in names}
    return make_loop("tools", {"tools": table, **options})


def model_parts(tokenizer: HfTokenizer, segment: Segment) -> list[str]:
    """The stretches of tokens that are in the loss."""
    mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    ids = segment.response_ids.tolist()
    return [tokenizer.decode(ids[a:b], special=True) for a, b in zip(edges[::2], edges[1::2], strict=True)]


async def greet(name: str) -> dict[str, str]:
    """Greet somebody."""
    return {"hello": name}


def broken(text: str) -> str:
    """A tool that fails."""
    raise RuntimeError("no such host")


async def lost(text: str) -> str:
    """A tool that awaits something that was cancelled."""
    work = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
    work.cancel()
    await work
    return text


async def leaving(text: str) -> str:
    """A tool that would end the process."""
    raise SystemExit(4)


async def stuck(text: str) -> str:
    """A tool that never answers."""
    await asyncio.Event().wait()
    return text


def test_the_model_calls_a_tool_and_answers_with_its_result(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])
    sample = converse(tools("calculator"), model)
    assert (sample.status, sample.finish_reason, sample.text) == (
        SampleStatus.COMPLETED,
        FinishReason.STOP,
        "It is 42",
    )
    [segment] = sample.segments
    assert tokenizer.decode(segment.prompt_ids.tolist(), special=True) == (
        "tool calculator\nuser: 6*7?<eos>\nassistant: "
    )
    assert tokenizer.decode(segment.response_ids.tolist(), special=True) == (
        f"{SUM}<eos>\ntool: 42<eos>\nassistant: It is 42<eos>"
    )
    assert sample.extra["messages"] == [
        {"role": "assistant", "content": SUM},
        {"role": "tool", "name": "calculator", "content": "42"},
        {"role": "assistant", "content": "It is 42"},
    ]


def test_what_the_environment_wrote_is_out_of_the_loss_and_counts_as_of_the_weights_before_it(
    tokenizer: HfTokenizer,
) -> None:
    sample = converse(tools("calculator"), Model(tokenizer, [SUM, SUM, "It is 42"], arrays=True))
    [segment] = sample.segments
    assert model_parts(tokenizer, segment) == [f"{SUM}<eos>", f"{SUM}<eos>", "It is 42<eos>"]
    assert segment.loss_mask is not None
    assert set(segment.logprobs[segment.loss_mask].tolist()) == {-0.25}
    assert set(segment.logprobs[~segment.loss_mask].tolist()) == {0.0}
    routed = segment.arrays["routed"]
    assert isinstance(routed, np.ndarray)
    assert (routed == np.where(segment.loss_mask, 7, 0)[:, None]).all()
    glue = len("\ntool: 42") + 1 + len("\nassistant: ")
    assert segment.versions == (
        VersionSpan(1, 0, len(SUM) + 1 + glue),
        VersionSpan(1, 1, len(SUM) + 1 + glue),
        VersionSpan(1, 2, len("It is 42") + 1),
    )
    rules = TaskRules(batch_groups=1, max_staleness=4, max_token_staleness=0)
    # as if only the model's tokens were there: the oldest, or four steps before the newest
    assert versions_of(sample, Floors(), rules) == (min(0, 2 - 4), 0)


def test_the_next_turn_gets_the_very_tokens_of_the_turn_before(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])
    [segment] = converse(tools("calculator"), model).segments
    first, second = model.requests
    said = [*tokenizer.encode(SUM), EOS]
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert second.prompt_ids[len(first.prompt_ids) :][: len(said)].tolist() == said
    whole = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    assert whole[: len(second.prompt_ids)] == second.prompt_ids.tolist()
    assert (first.prefix_ids, second.prefix_ids) == (None, None)


def test_what_the_model_wrote_is_never_tokenised_again(tokenizer: HfTokenizer) -> None:
    encoded: list[str] = []

    class Watched(HfTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(text)
            return super().encode(text)

    watched = Watched(tokenizer._folder)
    model = Model(tokenizer, [SUM, SUM, "It is 42"])
    given = rollout(model, Prompt("6*7?"))
    encoded.clear()
    asyncio.run(tools("calculator").run(replace(given, tokenizer=watched)))
    glue = "\ntool: 42<eos>\nassistant: "
    assert encoded == ["tool calculator\nuser: 6*7?<eos>\nassistant: ", glue, glue]


def test_ids_that_the_tokenizer_would_not_write_itself_stay(tokenizer: HfTokenizer) -> None:
    """Half a character, and a special token in the middle: both are what the model wrote, so both stay."""
    odd = [*tokenizer.encode("é")[:1], PAD, *tokenizer.encode(SUM), EOS]
    model = Model(tokenizer, [odd, "done"])
    [segment] = converse(tools("calculator"), model).segments
    assert segment.response_ids[: len(odd)].tolist() == odd
    glue = tokenizer.encode("\ntool: 42<eos>\nassistant: ")
    assert model.requests[1].prompt_ids.tolist() == [*segment.prompt_ids.tolist(), *odd, *glue]


def test_a_template_that_drops_earlier_thoughts_opens_a_new_segment(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    thought = f"<think>six sevens</think>{SUM}"
    model = Model(tokenizer, [thought, "It is 42"])
    sample = converse(tools("calculator"), model)
    first, second = sample.segments
    assert tokenizer.decode(first.response_ids.tolist(), special=True) == f"{thought}<eos>"
    assert tokenizer.decode(second.prompt_ids.tolist(), special=True) == (
        f"tool calculator\nuser: 6*7?<eos>\nassistant: {SUM}<eos>\ntool: 42<eos>\nassistant: "
    )
    assert tokenizer.decode(second.response_ids.tolist(), special=True) == "It is 42<eos>"
    assert (first.loss_mask, second.loss_mask) == (None, None)
    assert model.requests[1].prompt_ids.tolist() == second.prompt_ids.tolist()
    assert sample.text == "It is 42"


def test_a_turn_that_ends_otherwise_than_the_template_ends_it_opens_a_new_segment(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL.replace("<eos>", "<end>"))
    sample = converse(tools("calculator"), Model(tokenizer, [SUM, "It is 42"]))
    assert len(sample.segments) == 2


def test_all_calls_of_a_turn_are_answered_in_order(tokenizer: HfTokenizer) -> None:
    calls = f"{call('greet', name='Ann')} and {call('calculator', expression='1+1')}"
    sample = converse(tools("calculator", "greet"), Model(tokenizer, [calls, "done"]))
    assert [message["content"] for message in sample.extra["messages"][1:3]] == ['{"hello":"Ann"}', "2"]


def test_a_sample_knows_its_tools_and_its_session(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])
    sample = converse(tools("calculator"), model)
    assert [request.session for request in model.requests] == ["math/1/0/1"] * 2
    assert [request.priority for request in model.requests] == [3, 3]
    assert (sample.session_id, sample.tool_choice) == ("math/1/0/1", "auto")
    assert sample.tools == (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Work out an arithmetic expression: numbers, + - * / // % ** and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                    "additionalProperties": False,
                },
            },
        },
    )


def test_every_turn_draws_with_a_seed_of_its_own(tokenizer: HfTokenizer) -> None:
    seeds = []
    for _ in range(2):
        model = Model(tokenizer, [SUM, SUM, "It is 42"])
        converse(tools("calculator"), model)
        seeds.append([request.sampling.seed for request in model.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<tool_call>{nonsense}</tool_call>", "error: a tool call is one JSON object; this is not"),
        ("<tool_call>[1]</tool_call>", 'error: a tool call is a JSON object with "name"'),
        ('<tool_call>{"name": "calculator", "arguments": "6*7"}</tool_call>', "error: \"arguments\" of 'calculator'"),
        ('<tool_call>{"name": "calculator"', "error: a tool call without </tool_call>"),
        (call("weather", city="Rome"), "error: there is no tool 'weather'; use one of calculator"),
        (
            call("calculator", sum="6*7"),
            "error: wrong arguments for 'calculator': expression: is required, but missing",
        ),
        (call("calculator", expression="6*x"), "error: cannot work out '6*x'"),
    ],
)
def test_what_the_model_does_wrong_is_told_to_it(tokenizer: HfTokenizer, said: str, answer: str) -> None:
    sample = converse(tools("calculator"), Model(tokenizer, [said, "sorry"]))
    assert sample.status is SampleStatus.COMPLETED
    assert sample.extra["messages"][1]["content"].startswith(answer)


def test_a_call_that_is_only_thought_of_is_none(tokenizer: HfTokenizer) -> None:
    sample = converse(tools("calculator"), Model(tokenizer, [f"<think>{SUM}</think>42"]))
    assert sample.finish_reason is FinishReason.STOP
    assert len(sample.extra["messages"]) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "no such host"), ("lost", "it was cancelled from within"), ("leaving", r"SystemExit\(4\)")],
)
def test_a_tool_that_fails_costs_its_sample_or_is_told_to_the_model(
    tokenizer: HfTokenizer, name: str, reason: str
) -> None:
    words = [call(name, text="x"), "I give up"]
    with pytest.raises(RuntimeError, match=f"tool '{name}': RuntimeError: {reason}"):
        converse(tools(name), Model(tokenizer, words))
    sample = converse(tools(name, tell_errors=True), Model(tokenizer, words))
    assert sample.status is SampleStatus.COMPLETED
    assert re.fullmatch(f"error: tool '{name}': RuntimeError: {reason}", sample.extra["messages"][1]["content"])


def test_a_tool_that_hangs_costs_its_sample_after_its_time(tokenizer: HfTokenizer) -> None:
    with pytest.raises(RuntimeError, match=r"tool 'stuck': took longer than 0.01 s"):
        converse(tools("stuck", each={"timeout_s": 0.01}), Model(tokenizer, [call("stuck", text="x")]))


def test_a_tool_is_called_so_often_in_one_sample_and_no_more(tokenizer: HfTokenizer) -> None:
    sample = converse(tools("calculator", each={"max_calls": 2}), Model(tokenizer, [SUM * 3, SUM, "done"]))
    answers = [message["content"] for message in sample.extra["messages"] if message["role"] == "tool"]
    used_up = "error: 'calculator' may be called 2 times in one sample"
    assert answers == ["42", "42", used_up, used_up]


RUNNING: Counter[str] = Counter()


async def counted(text: str) -> str:
    """Notes how many of it run at the same time."""
    RUNNING["now"] += 1
    RUNNING["most"] = max(RUNNING["most"], RUNNING["now"])
    for _ in range(5):
        await asyncio.sleep(0)
    RUNNING["now"] -= 1
    return text


def test_so_many_calls_of_a_tool_run_at_a_time_over_all_samples(tokenizer: HfTokenizer) -> None:
    RUNNING.clear()
    words = [call("counted", text="x") * 2, "done"]

    async def five() -> None:
        loop = tools("counted", each={"concurrent": 2})
        await asyncio.gather(*(loop.run(rollout(Model(tokenizer, words), Prompt("x"))) for _ in range(5)))

    asyncio.run(five())
    assert RUNNING == {"now": 0, "most": 2}


STARTED: list[str] = []
GO_ON = threading.Event()


def blocks(text: str) -> str:
    """A tool that blocks its thread."""
    STARTED.append(text)
    GO_ON.wait(PATIENCE_S)
    return text


def test_a_blocking_tool_keeps_its_place_until_it_ends_and_blocks_nobody_else(tokenizer: HfTokenizer) -> None:
    async def scene() -> Sample:
        loop = tools("blocks", each={"concurrent": 1, "timeout_s": 1.0})
        late, waiting = (Model(tokenizer, [call("blocks", text=text), "done"]) for text in ("first", "second"))
        with pytest.raises(RuntimeError, match=r"tool 'blocks': took longer than 1 s"):
            await loop.run(rollout(late, Prompt("x")))
        second = asyncio.create_task(loop.run(rollout(waiting, Prompt("x"))))
        while not waiting.requests:
            await asyncio.sleep(0)
        assert STARTED == ["first"]
        GO_ON.set()
        return await asyncio.wait_for(second, PATIENCE_S)

    sample = asyncio.run(scene())
    assert STARTED == ["first", "second"]
    assert sample.extra["messages"][1]["content"] == "second"


def test_long_answers_are_cut_off(tokenizer: HfTokenizer) -> None:
    sample = converse(
        tools("calculator", max_answer_chars=3), Model(tokenizer, [call("calculator", expression="10**9"), "done"])
    )
    assert sample.extra["messages"][1]["content"] == "100"


def test_the_model_has_so_many_turns(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, SUM, SUM])
    sample = converse(tools("calculator", max_turns=2), model)
    assert len(model.requests) == 2
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, FinishReason.LENGTH)
    assert (sample.reward, "environment_reward" in sample.extra) == (None, False), "its judge is asked"
    [segment] = sample.segments
    assert segment.response_ids[-1] == EOS


OUT_OF_TURNS: tuple[dict[str, Any], dict[str, Any]] = {"max_turns": 2}, {}
OUT_OF_TOKENS: tuple[dict[str, Any], dict[str, Any]] = {}, {"max_tokens": len(SUM) + 20}


@pytest.mark.parametrize(("options", "limits"), [OUT_OF_TURNS, OUT_OF_TOKENS], ids=["turns", "tokens"])
def test_a_sample_without_an_end_fails_or_has_a_fixed_reward_if_the_settings_say_so(
    tokenizer: HfTokenizer, options: dict[str, Any], limits: dict[str, Any]
) -> None:
    sample = converse(tools("calculator", unfinished=-1, **options), Model(tokenizer, [SUM] * 8), **limits)
    assert (sample.reward, sample.finish_reason) == (-1.0, FinishReason.LENGTH)
    with pytest.raises(SampleFailed, match="unfinished: it "):
        converse(tools("calculator", unfinished="fail", **options), Model(tokenizer, [SUM] * 8), **limits)
    done = converse(tools("calculator", unfinished="fail"), Model(tokenizer, [SUM, "42"]))
    assert (done.status, done.reward) == (SampleStatus.COMPLETED, None)


def test_the_budget_is_of_all_turns_and_of_the_tools_answers(tokenizer: HfTokenizer) -> None:
    glue = len(tokenizer.encode("\ntool: 42<eos>\nassistant: "))
    used = len(SUM) + 1 + glue
    model = Model(tokenizer, [SUM, "It is 42"])
    sample = converse(tools("calculator"), model, max_tokens=used + 5)
    assert [request.sampling.max_tokens for request in model.requests] == [used + 5, 5]
    assert (sample.finish_reason, sample.response_tokens, sample.text) == (FinishReason.LENGTH, used + 5, "It is")
    assert sample.sampling["max_tokens"] == used + 5


def test_an_answer_that_leaves_no_room_for_a_turn_ends_the_sample_without_it(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])
    sample = converse(tools("calculator"), model, max_tokens=len(SUM) + 10)
    assert len(model.requests) == 1
    assert sample.finish_reason is FinishReason.LENGTH
    [segment] = sample.segments
    assert segment.loss_mask is None
    assert len(segment.response_ids) == len(SUM) + 1


def test_an_answer_that_fills_the_engines_context_ends_the_sample_without_it(tokenizer: HfTokenizer) -> None:
    class Narrow(Model):
        async def generate(self, request: Request) -> Completion:
            token_limit(request, context_tokens)
            return await super().generate(request)

    model = Narrow(tokenizer, [SUM, "It is 42"])
    context_tokens = len(tokenizer.encode("tool calculator\nuser: 6*7?\nassistant: ")) + len(SUM) + 10
    sample = converse(tools("calculator"), model)
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, FinishReason.LENGTH)
    [segment] = sample.segments
    assert segment.loss_mask is None
    assert len(segment.response_ids) == len(SUM) + 1
    context_tokens = 5
    with pytest.raises(ContextFull):
        converse(tools("calculator"), Narrow(tokenizer, [SUM]))


def test_no_sequence_is_longer_than_prompt_and_budget_after_a_broken_prefix(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    model = Model(tokenizer, [f"<think>x</think>{SUM}", "It is 42 or so" * 20])
    sample = converse(tools("calculator"), model, max_tokens=150, max_prompt_tokens=39)
    assert len(sample.segments) == 2
    assert sample.finish_reason is FinishReason.LENGTH
    assert [len(each.prompt_ids) + len(each.response_ids) for each in sample.segments][1] == 150 + 39
    assert sample.response_tokens < 150


def test_a_prompt_that_is_too_long_with_its_tools_fails_with_both_numbers(tokenizer: HfTokenizer) -> None:
    sample = converse(tools("calculator"), Model(tokenizer, []), max_prompt_tokens=30)
    assert sample.status is SampleStatus.FAILED
    assert sample.error is not None
    assert sample.error.startswith("the prompt has 39 tokens with its tools")
    assert sample.error.endswith("max_prompt_tokens is 30")


def test_prompts_that_are_token_ids_are_refused(tokenizer: HfTokenizer) -> None:
    with pytest.raises(SampleFailed, match="token ids, and a conversation of several turns needs messages"):
        converse(tools("calculator"), Model(tokenizer, []), Prompt("x", ids=(7, 8)))


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_turn_that_is_aborted_or_fails_ends_the_sample_so(tokenizer: HfTokenizer, reason: FinishReason) -> None:
    sample = converse(tools("calculator"), Model(tokenizer, [SUM, reason]))
    assert sample.finish_reason is reason
    assert sample.status is (SampleStatus.ABORTED if reason is FinishReason.ABORT else SampleStatus.FAILED)


@pytest.mark.parametrize("template", [PLAIN, FORGETFUL])
def test_conversations_continue_after_any_whole_turn(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    words = [f"<think>{number}</think>{call('calculator', expression=f'{number}+1')}" for number in range(4)]
    loop, kept = tools("calculator"), list[Sample]()
    first = Model(tokenizer, [*words, "done"], arrays=True)
    whole = asyncio.run(loop.run(replace(rollout(first, Prompt("6*7?")), keep=kept.append)))
    assert is_resumable(loop)
    assert len(kept) == 4
    for turns, previous in enumerate(kept, start=1):
        assert (previous.status, len(previous.extra["messages"])) == (SampleStatus.ABORTED, 2 * turns)
        model = Model(tokenizer, [*words, "done"], first.requests[:turns], arrays=True)
        again = replace(rollout(model, Prompt("6*7?")), previous=previous)
        continued = asyncio.run(loop.run(again))
        same_tokens(continued, whole)
        assert continued.extra == whole.extra
        assert [request.sampling.seed for request in model.requests] == [each.sampling.seed for each in first.requests]


def same_tokens(one: Sample, other: Sample) -> None:
    for found, wanted in zip(one.segments, other.segments, strict=True):
        assert found.prompt_ids.tolist() == wanted.prompt_ids.tolist()
        assert found.response_ids.tolist() == wanted.response_ids.tolist()
        assert found.logprobs.tolist() == wanted.logprobs.tolist()
        assert found.versions == wanted.versions
        assert (found.loss_mask is None) == (wanted.loss_mask is None)
        if found.loss_mask is not None and wanted.loss_mask is not None:
            assert found.loss_mask.tolist() == wanted.loss_mask.tolist()
        routes: list[Any] = [segment.arrays["routed"] for segment in (found, wanted)]
        assert np.array_equal(*routes)


def test_what_is_kept_of_a_conversation_travels_in_parts(tokenizer: HfTokenizer) -> None:
    parts, tokens = list[Sample](), 0

    def keep(sample: Sample) -> None:
        nonlocal tokens
        parts.append(rest_of(sample, tokens))
        tokens = sample.response_tokens
        same_tokens(join_parts(parts), sample)

    model = Model(tokenizer, [SUM, SUM, SUM, "done"], arrays=True)
    asyncio.run(tools("calculator").run(replace(rollout(model, Prompt("6*7?")), keep=keep)))
    assert len(parts) == 3


def test_an_interrupted_turn_is_taken_again(tokenizer: HfTokenizer) -> None:
    interrupted = converse(tools("calculator"), Model(tokenizer, [SUM, FinishReason.ABORT]))
    assert len(interrupted.extra["messages"]) == 2
    model = Model(tokenizer, ["", "done"], [Request(np.zeros(0, np.int32), Sampling(max_tokens=1))])
    again = replace(rollout(model, Prompt("6*7?")), previous=interrupted)
    whole = converse(tools("calculator"), Model(tokenizer, [SUM, "done"]))
    continued = asyncio.run(tools("calculator").run(again))
    assert [each.response_ids.tolist() for each in continued.segments] == [
        each.response_ids.tolist() for each in whole.segments
    ]


def test_calls_made_before_an_interruption_count(tokenizer: HfTokenizer) -> None:
    loop = tools("calculator", each={"max_calls": 2})
    interrupted = converse(loop, Model(tokenizer, [SUM * 2, FinishReason.ABORT]))
    model = Model(tokenizer, ["", SUM, "done"], [Request(np.zeros(0, np.int32), Sampling(max_tokens=1))])
    continued = asyncio.run(loop.run(replace(rollout(model, Prompt("6*7?")), previous=interrupted)))
    assert "may be called 2 times" in continued.extra["messages"][-2]["content"]


def test_a_conversation_whose_opening_has_changed_is_not_continued(tokenizer: HfTokenizer) -> None:
    interrupted = converse(tools("calculator"), Model(tokenizer, [SUM, FinishReason.ABORT]))
    again = replace(rollout(Model(tokenizer, ["done"]), Prompt("6*7?")), previous=interrupted)
    with pytest.raises(ValueError, match="its opening has changed"):
        asyncio.run(tools("calculator", "greet").run(again))


def test_the_buffer_takes_such_samples(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    (tmp_path / "forgetful").mkdir()
    forgetful = chat_tokenizer(tmp_path / "forgetful", FORGETFUL)
    samples = [
        converse(tools("calculator"), Model(each, [f"<think>x</think>{SUM}", "It is 42"], arrays=True))
        for each in (tokenizer, forgetful)
    ]
    check_group([replace(sample, reward=1.0) for sample in samples], group_size=2, vocab_size=258)


FAILURES = iter([RuntimeError("no such host")])


def flaky(text: str) -> str:
    """A tool that fails once."""
    for error in FAILURES:
        raise error
    return text


def liked(prompt: Prompt, sample: Sample) -> float:
    """A judge that likes everything."""
    return 1.0


def test_xp14_a_tool_that_fails_costs_its_sample_and_not_the_others_nor_the_worker(
    buffer: Buffer, server_url: str
) -> None:
    options = {"tools": {"flaky": {"function": f"{__name__}.flaky"}}, "max_turns": 1}
    rules = {"min_valid_samples": 1, "judge": f"{__name__}.liked"}
    world = WorkerWorld(buffer, server_url, {**rules, "agent_loop": "tools", "agent_options": options})
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 2)
        assert worker.maker.tokens == 4 * len([*answer.encode(), EOS])  # what the engine made, trained or not

    answer = call("flaky", text="x")
    script = world.play(scene, answer=answer)
    samples = [sample for _, group in world.results(2) for sample in group]
    [failed] = [sample for sample in samples if sample.status is SampleStatus.FAILED]
    assert failed.error is not None
    assert failed.error.startswith("tool 'flaky': RuntimeError: no such host (tests/workers/agents")
    assert failed.error.endswith(" in flaky)")
    assert failed.failure is FailureKind.TOOL
    assert [sample.status for sample in samples].count(SampleStatus.COMPLETED) == 3
    sessions = {request.session for request in script.requests}
    assert len(sessions) == 4
    assert {sample.session_id for sample in samples if sample is not failed} < sessions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "tools: is required, but missing"),
        ({"tools": {}}, "tools: must have at least 1 item"),
        ({"tools": {"calculator": {}}, "turns": 3}, "turns: unknown key; did you mean 'max_turns'?"),
        ({"tools": {"weather": {}}}, "tool 'weather': use calculator, lookup, or a dotted path"),
        ({"tools": {"calculator": {"options": {"digits": 3}}}}, "tool 'calculator' is a function and takes no options"),
        ({"tools": {"lookup": {"options": {"tabel": {}}}}}, "tool 'lookup' cannot be made with options"),
        ({"tools": {"mine": {"function": f"{__name__}.untyped"}}}, "tool 'mine': parameter 'anything' needs"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("tools", options)
    assert words in str(refused.value)


def untyped(anything):  # type: ignore[no-untyped-def]
    """Nobody knows what it wants."""

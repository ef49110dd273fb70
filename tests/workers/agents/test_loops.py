"""The single-turn loop and the decisions that it is made of."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    ArrayRef,
    FinishReason,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.frame_decoding import decode_sample
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.parts import join_parts, join_spans, rest_of
from rollq.workers.agents.conversation import Conversation, with_environment
from rollq.workers.agents.loops import PromptTooLong, Rollout, SingleTurn, prompt_tokens
from rollq.workers.agents.segments import join, spent
from rollq.workers.engines.protocol import Completion, Request, Sampling, parse_reason
from rollq.workers.seeds import sample_seed
from rollq.workers.tokenizers.byte import EOS_ID, ByteTokenizer

TOKENIZER = ByteTokenizer()


class Engine:
    """Answers every request with the same completion."""

    def __init__(self, ids: Sequence[int], reason: Any = FinishReason.STOP, *, version: int = 0) -> None:
        self.completion = Completion(
            np.array(ids, np.int32),
            np.full(len(ids), -0.25, np.float32),
            (VersionSpan(1, version, len(ids)),) if ids else (),
            reason,
        )
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return self.completion


def run(
    engine: Engine,
    *,
    previous: Sample = EMPTY_SAMPLE,
    max_tokens: int = 10,
    max_prompt_tokens: int = 100,
    stop: tuple[str, ...] = ("\n",),
    **rare: Any,
) -> Sample:
    prompt = Prompt("what?")
    rollout = Rollout(
        prompt=prompt,
        prompt_ids=prompt_tokens(prompt, TOKENIZER),
        previous=previous,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.7, stop=stop, seed=5, **rare),
        max_prompt_tokens=max_prompt_tokens,
        priority=3,
        tokenizer=TOKENIZER,
        generate=engine.generate,
    )
    return asyncio.run(SingleTurn().run(rollout))


def partial(ids: Sequence[int], version: int = 0, **arrays: Any) -> Sample:
    segment = Segment(
        np.array(list(b"what?"), np.int32),
        np.array(list(ids), np.int32),
        np.full(len(ids), -0.5, np.float32),
        (VersionSpan(1, version, len(ids)),),
        arrays=arrays,
    )
    return Sample(segments=(segment,), status=SampleStatus.ABORTED)


def test_every_sampling_parameter_is_sent_and_stored() -> None:
    engine = Engine([*b"ok", EOS_ID])
    sample = run(engine)
    assert engine.requests[0].sampling == Sampling(10, 0.7, 1.0, 0, ("\n",), 5)
    assert engine.requests[0].priority == 3
    expected = {"max_tokens": 10, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop": ("\n",), "seed": 5}
    assert sample.sampling == expected
    assert sample.text == "ok"


def test_rare_parameters_are_stored_only_where_they_have_an_effect() -> None:
    rare: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": (98,), "logit_bias": {"97": 2.5}}
    sample = decode_sample(encode_samples([run(Engine(list(b"ab")), **rare)]))
    usual = {"max_tokens": 10, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop": ["\n"], "seed": 5}
    assert sample.sampling == {**usual, "ignore_eos": True, "stop_token_ids": [98], "logit_bias": {"97": 2.5}}


@pytest.mark.parametrize(
    ("rare", "text"),
    [({}, "ab"), ({"ignore_eos": True}, "abcd"), ({"ignore_eos": True, "stop_token_ids": (EOS_ID,)}, "ab")],
)
def test_an_interrupted_response_continues_after_eos_only_if_that_does_not_end_it(
    rare: dict[str, Any], text: str
) -> None:
    sample = run(Engine(list(b"cd")), previous=partial([*b"ab", EOS_ID]), **rare)
    assert (sample.text, sample.finish_reason) == (text, FinishReason.STOP)


@pytest.mark.parametrize(("stop_token_ids", "content"), [((), "ok!"), (tuple(b"!"), "ok")])
def test_a_stop_token_is_no_part_of_the_message_that_it_ends(stop_token_ids: tuple[int, ...], content: str) -> None:
    end_ids = Sampling(10, stop_token_ids=stop_token_ids).end_ids(TOKENIZER.eos_ids)
    conversation = Conversation(TOKENIZER, (), ({"role": "user", "content": "what?"},), "what?", np.zeros(1, np.int32))
    after = conversation.after_model(Engine(list(b"ok!")).completion, end_ids)
    assert after.messages[-1]["content"] == content
    assert after.segments[0].response_ids.tolist() == list(b"ok!")


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", SampleStatus.COMPLETED),
        ("LENGTH", SampleStatus.COMPLETED),
        ("Tool_Calls", SampleStatus.COMPLETED),
        (FinishReason.ABORT, SampleStatus.ABORTED),
        ("error", SampleStatus.FAILED),
        (None, SampleStatus.FAILED),
        ("content_filter", SampleStatus.FAILED),
    ],
)
def test_xd03_finish_reasons_decide_the_status_whatever_their_case(reason: Any, status: SampleStatus) -> None:
    sample = run(Engine(list(b"ok"), reason))
    assert sample.status is status
    assert (sample.error is not None) == (status is SampleStatus.FAILED)


def test_xd03_unknown_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_reason("content_filter") is FinishReason.ERROR
    assert "'content_filter'" in caplog.text


def test_xd04_a_completed_sample_without_tokens_is_failed() -> None:
    sample = run(Engine([]))
    assert sample.status is SampleStatus.FAILED
    assert sample.error == "the engine finished (stop) without a token"


def test_xd04_tokens_without_logprobs_are_refused() -> None:
    engine = Engine(list(b"ok"))
    engine.completion = Completion(
        engine.completion.ids, np.zeros(0, np.float32), engine.completion.versions, FinishReason.STOP
    )
    with pytest.raises(ValueError, match="2 tokens with 0 logprobs"):
        run(engine)


def test_a_stop_string_that_an_interruption_cut_in_two_ends_the_response() -> None:
    sample = run(Engine(list(b"nd and on"), FinishReason.LENGTH), previous=partial(b"the e"), stop=("end",))
    assert (sample.text, sample.status, sample.finish_reason) == ("the end", SampleStatus.COMPLETED, FinishReason.STOP)


def test_xd02_arrays_of_the_engine_are_joined_after_those_of_the_interrupted_attempt() -> None:
    engine = Engine(list(b"cd"))
    engine.completion = replace(engine.completion, arrays={"routed": np.array([[5, 6], [7, 8]], np.uint8)})
    image = np.zeros((4, 4), np.float16)
    interrupted = partial(b"ab", routed=np.array([[1, 2], [3, 4]], np.uint8), image=image)
    [segment] = run(engine, previous=interrupted).segments
    routed = segment.arrays["routed"]
    assert isinstance(routed, np.ndarray)
    assert routed.dtype == np.uint8
    assert routed.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert segment.arrays["image"] is image


def test_xd02_arrays_are_kept_when_an_attempt_added_nothing() -> None:
    engine = Engine([], FinishReason.ABORT)
    engine.completion = replace(engine.completion, arrays={"routed": np.zeros((0, 2), np.uint8)})
    interrupted = partial(b"ab", routed=np.array([[1, 2], [3, 4]], np.uint8))
    [segment] = run(engine, previous=interrupted).segments
    assert segment.arrays == interrupted.segments[0].arrays


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"routed": np.zeros((2, 3), np.uint8)},
        {"routed": np.zeros((1, 2), np.uint8)},
        {"routed": np.zeros((2, 2), np.int32)},
        {"routed": ArrayRef("file:///routed", "0", (2, 2), "uint8")},
    ],
)
def test_xd02_arrays_that_do_not_continue_each_other_are_refused(first: Mapping[str, Any]) -> None:
    engine = Engine(list(b"cd"))
    engine.completion = replace(engine.completion, arrays={"routed": np.zeros((2, 2), np.uint8)})
    with pytest.raises(
        ValueError,
        match=r"'routed' of the engine is uint8 \[2, 2\]; it cannot continue the array of the first 2 tokens",
    ):
        run(engine, previous=partial(b"ab", **first))


def whole(*entries: int) -> np.ndarray[Any, Any]:
    """An array over prompt and response, whose prompt is `what?`, with one value per token."""
    return np.array(entries, np.uint8).reshape(-1, 1, 1)


def routed(segment: Segment) -> list[int]:
    """The entries of the array `routed` of a segment."""
    array = segment.arrays["routed"]
    assert isinstance(array, np.ndarray)
    return [int(entry) for entry in array.ravel()]


def test_an_array_over_the_whole_context_fills_only_what_was_unknown() -> None:
    engine = Engine(list(b"cd"))
    engine.completion = replace(engine.completion, arrays={"routed": whole(9, 9, 9, 9, 9, 9, 7, 8, 0)})
    [segment] = run(engine, previous=partial(b"ab", routed=whole(1, 2, 3, 4, 5, 6, 0))).segments
    assert routed(segment) == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_an_array_that_the_engine_no_longer_reports_is_unknown_until_it_is_read_again() -> None:
    interrupted = run(Engine(list(b"c"), FinishReason.ABORT), previous=partial(b"ab", routed=whole(*range(1, 8))))
    assert routed(interrupted.segments[0]) == [*range(1, 8), 0]
    engine = Engine(list(b"d"))
    engine.completion = replace(engine.completion, arrays={"routed": whole(*[9] * 8, 0)})
    [segment] = run(engine, previous=interrupted).segments
    assert routed(segment) == [*range(1, 8), 9, 0]


def test_an_array_over_the_whole_context_can_be_new() -> None:
    engine = Engine(list(b"cd"))
    engine.completion = replace(engine.completion, arrays={"routed": whole(*range(1, 10))})
    [segment] = run(engine, previous=partial(b"ab")).segments
    assert routed(segment) == [*range(1, 10)]


def test_an_array_over_the_whole_context_ends_where_a_stop_string_does() -> None:
    engine = Engine(list(b"nd and on"), FinishReason.LENGTH)
    engine.completion = replace(engine.completion, arrays={"routed": whole(*range(1, 20))})
    [segment] = run(engine, previous=partial(b"the e"), stop=("end",)).segments
    assert routed(segment) == [*range(1, 13)]


def test_an_array_over_the_whole_context_is_salvaged_in_parts() -> None:
    sample = partial(b"abcd", routed=whole(*range(1, 10)))
    joined = join_parts([replace(sample, segments=(cut(sample.segments[0], 3),)), rest_of(sample, 3)])
    assert routed(joined.segments[0]) == [*range(1, 10)]


def cut(segment: Segment, tokens: int) -> Segment:
    """The first response tokens of a segment of one version."""
    return replace(
        segment,
        response_ids=segment.response_ids[:tokens],
        logprobs=segment.logprobs[:tokens],
        versions=(segment.versions[0]._replace(tokens=tokens),),
        arrays={"routed": whole(*routed(segment)[: len(segment.prompt_ids) + tokens])},
    )


def test_the_next_turn_fills_in_the_entries_of_what_the_environment_wrote() -> None:
    first = replace(Engine(list(b"ab")).completion, arrays={"routed": whole(1, 1, 1, 1, 0)})
    prompt_ids, from_environment = np.array([7, 8, 9], np.int32), np.array([5, 6], np.int32)
    asked = with_environment(join(prompt_ids, None, first), from_environment)
    assert routed(asked) == [1, 1, 1, 1, 0, 0, 0]
    second = replace(Engine(list(b"c")).completion, arrays={"routed": whole(2, 2, 2, 2, 2, 2, 2, 0)})
    assert routed(join(prompt_ids, asked, second)) == [1, 1, 1, 1, 2, 2, 2, 0]


def test_xd02_an_array_that_does_not_cover_the_tokens_is_refused() -> None:
    engine = Engine(list(b"cd"))
    engine.completion = replace(engine.completion, arrays={"routed": np.zeros((3, 2), np.uint8)})
    with pytest.raises(ValueError, match="2 tokens with 3 entries of array 'routed'"):
        run(engine)


def test_xp10_an_interrupted_sample_goes_on_from_its_tokens() -> None:
    engine = Engine([*b"cd", EOS_ID], version=4)
    sample = run(engine, previous=partial(b"ab", version=3))
    (request,) = engine.requests
    assert request.prefix_ids is not None
    assert request.prefix_ids.tolist() == list(b"ab")
    assert request.sampling.max_tokens == 8
    assert request.sampling.seed == 5
    (segment,) = sample.segments
    assert segment.response_ids.tolist() == [*b"abcd", EOS_ID]
    assert segment.logprobs.tolist() == [-0.5, -0.5, -0.25, -0.25, -0.25]
    assert segment.versions == (VersionSpan(1, 3, 2), VersionSpan(1, 4, 3))
    assert sample.sampling["max_tokens"] == 10
    assert sample.text == "abcd"


def test_xp10_a_sample_that_is_interrupted_again_and_again_stays_within_its_tokens() -> None:
    sample, asked = EMPTY_SAMPLE, []
    for version in range(3):
        engine = Engine(list(b"abc"), FinishReason.ABORT, version=version)
        sample = run(engine, previous=sample)
        asked.append(engine.requests[0].sampling.max_tokens)
    engine = Engine(list(b"d"), FinishReason.LENGTH, version=3)
    sample = run(engine, previous=sample)
    assert [*asked, engine.requests[0].sampling.max_tokens] == [10, 7, 4, 1]
    (segment,) = sample.segments
    assert segment.response_ids.tolist() == list(b"abcabcabcd")
    assert [(span.version, span.tokens) for span in segment.versions] == [(0, 3), (1, 3), (2, 3), (3, 1)]
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("ids", "reason"), [([*b"ab", EOS_ID], FinishReason.STOP), (list(b"abcdefghij"), FinishReason.LENGTH)]
)
def test_xp11_a_sample_that_is_finished_already_needs_no_request(ids: list[int], reason: FinishReason) -> None:
    engine = Engine([])
    sample = run(engine, previous=partial(ids))
    assert engine.requests == []
    assert sample.status is SampleStatus.COMPLETED
    assert sample.finish_reason is reason


def test_spent_budgets_and_eos_end_a_response() -> None:
    eos = frozenset({1})
    assert spent(None, 3, eos) is None
    assert spent(np.array([], np.int32), 3, eos) is None
    assert spent(np.array([5], np.int32), 3, eos) is None
    assert spent(np.array([5, 1], np.int32), 3, eos) is FinishReason.STOP
    assert spent(np.array([5, 6, 7], np.int32), 3, eos) is FinishReason.LENGTH


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    engine = Engine([EOS_ID])
    with pytest.raises(PromptTooLong, match="the prompt has 5 tokens; max_prompt_tokens is 4"):
        run(engine, max_prompt_tokens=4)
    assert engine.requests == []


def test_prompts_are_ids_text_or_messages() -> None:
    assert prompt_tokens(Prompt("ignored", ids=(7, 8)), TOKENIZER).tolist() == [7, 8]
    assert prompt_tokens(Prompt("ab"), TOKENIZER).tolist() == list(b"ab")
    chat = prompt_tokens(Prompt(({"role": "user", "content": "hi"},)), TOKENIZER)
    assert chat.tolist() == list(b"user: hi\n")
    assert chat.dtype == np.int32


def test_spans_of_the_same_weights_become_one() -> None:
    a, b = VersionSpan(1, 3, 2), VersionSpan(1, 4, 5)
    assert join_spans((a,), (a, b)) == (VersionSpan(1, 3, 4), b)
    assert join_spans((a,), (b,)) == (a, b)
    assert join_spans((), (b,)) == (b,)
    assert join_spans((VersionSpan(1, 4, 1),), (VersionSpan(2, 4, 1),)) == (VersionSpan(1, 4, 1), VersionSpan(2, 4, 1))


def test_seeds_differ_in_everything_that_names_a_sample_and_repeat_otherwise() -> None:
    names = [
        (0, "a", 1, 0, 1),
        (1, "a", 1, 0, 1),
        (0, "b", 1, 0, 1),
        (0, "a", 2, 0, 1),
        (0, "a", 1, 1, 1),
        (0, "a", 1, 0, 2),
    ]
    seeds = [sample_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [sample_seed(*name) for name in names]
    assert all(0 <= seed < 1 << 63 for seed in seeds)

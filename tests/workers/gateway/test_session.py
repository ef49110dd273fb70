"""Sessions of the gateway: segments, repeats, records and limits, with a model that says given words."""

import asyncio
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus
from rollq.workers.agents.conversation import Message
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.gateway.calls import CONTEXT_FULL, Call, CallRefused
from rollq.workers.gateway.sessions import answered_calls, asked_calls, call_nodes
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.gateway.sessions.outcomes import Outcome
from rollq.workers.gateway.sessions.request_digest import after_message
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import FORGETFUL, Model, call, chat_tokenizer
from support.gateway_calls import (
    CALCULATOR,
    Client,
    Connection,
    as_message,
    as_stored,
    ask,
    make_session,
    run,
    serve,
    trained_tokens,
)

SUM = call("calculator", expression="6*7")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("forgetful"), FORGETFUL)


def text_of(tokenizer: HfTokenizer, sample: Sample) -> list[str]:
    """The text of every segment, with what is outside the loss in braces."""
    texts = []
    for segment in sample.segments:
        mask = np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask
        text, inside = tokenizer.decode(segment.prompt_ids.tolist(), special=True) + "|", True
        for token, trained in zip(segment.response_ids.tolist(), mask.tolist(), strict=True):
            if trained != inside:
                text += "}" if trained else "{"
                inside = trained
            text += tokenizer.decode([token], special=True)
        texts.append(text + ("" if inside else "}"))
    return texts


def test_a_conversation_with_a_tool_is_one_segment_with_the_results_outside_the_loss(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [SUM, "It is 42"])
    session = make_session(model)
    client = Client(session, tools=(CALCULATOR,))

    async def use() -> None:
        answer = await client.say("6*7?")
        assert (answer.content, answer.finish_reason) == ("", FinishReason.TOOL_CALLS)
        (asked,) = answer.calls
        assert (asked.name, dict(asked.arguments)) == ("calculator", {"expression": "6*7"})
        client.messages += ({"role": "tool", "tool_call_id": asked.id, "content": "42"},)
        assert (await client.ask()).content == "It is 42"

    run(use)
    sample = session.sample(extra={})
    assert text_of(tokenizer, sample) == [
        f"tool calculator\nuser: 6*7?<eos>\nassistant: |{SUM}<eos>{{\ntool: 42<eos>\nassistant: }}It is 42<eos>"
    ]
    assert (sample.status, sample.text) == (SampleStatus.COMPLETED, "It is 42")
    assert [(fact["number"], fact["parent"], fact["segment"]) for fact in sample.extra["calls"]] == [
        (0, None, 0),
        (1, 0, 0),
    ]


def test_only_some_of_the_names_that_a_client_makes_up_are_kept(tokenizer: HfTokenizer) -> None:
    """A sample with all of them would be too large for its group."""
    session = make_session(Model(tokenizer, ["Yes", "No"]))
    client = Client(session)

    async def use() -> None:
        await client.say("Sure?", ignored=("user", *(f"name {number}" for number in range(100))))
        await client.say("Really?", ignored=("user", "name 99"))

    run(use)
    ignored = session.sample(extra={}).extra["ignored"]
    assert (len(ignored), ignored["user"], ignored["name 0"], ignored["others"]) == (33, 2, 1, 100 - 31 + 1)


def test_thoughts_that_a_client_drops_are_put_back(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, ["<think>Hm.</think>Yes", "No"])
    session = make_session(model)
    client = Client(session)

    async def use() -> None:
        answer = await client.say("Sure?")
        assert (answer.content, answer.reasoning) == ("Yes", "Hm.")
        await client.say("Really?")

    run(use)
    assert text_of(tokenizer, session.sample(extra={})) == [
        "user: Sure?<eos>\nassistant: |<think>Hm.</think>Yes<eos>{\nuser: Really?<eos>\nassistant: }No<eos>"
    ]


def test_a_template_that_drops_thoughts_begins_a_new_segment(forgetful: HfTokenizer) -> None:
    session = make_session(Model(forgetful, ["<think>Hm.</think>Yes", "No"]))
    client = Client(session)

    async def use() -> None:
        await client.say("Sure?")
        await client.say("Really?")

    run(use)
    assert text_of(forgetful, session.sample(extra={})) == [
        "user: Sure?<eos>\nassistant: |<think>Hm.</think>Yes<eos>",
        "user: Sure?<eos>\nassistant: Yes<eos>\nuser: Really?<eos>\nassistant: |No<eos>",
    ]


def test_two_calls_that_continue_one_answer_have_credit_for_it_once(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, ["Go", "left", "right"]))

    async def use() -> None:
        first = Client(session)
        await first.say("Where?")
        second = Client(session, first.messages)
        await first.say("A")
        await second.say("B")

    run(use)
    sample = session.sample(extra={})
    assert text_of(tokenizer, sample) == [
        "user: Where?<eos>\nassistant: |Go<eos>{\nuser: A<eos>\nassistant: }left<eos>",
        "user: Where?<eos>\nassistant: Go<eos>\nuser: B<eos>\nassistant: |right<eos>",
    ]
    assert [fact["parent"] for fact in sample.extra["calls"]] == [None, 0, 0]
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


def test_subagents_that_run_at_the_same_time_are_segments_of_their_own(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, ["Main", "one", "two"]))

    async def use() -> None:
        main = Client(session)
        await main.say("Task")
        one, two = (
            Client(session, ({"role": "system", "content": "1"},)),
            Client(session, ({"role": "system", "content": "2"},)),
        )
        await asyncio.gather(one.say("a"), two.say("b"))

    run(use)
    sample = session.sample(extra={})
    assert len(sample.segments) == 3
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


def test_a_history_that_is_compacted_is_a_segment_and_what_follows_another(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, [SUM, "Summary: 42", "Done"]))

    async def use() -> None:
        client = Client(session, tools=(CALCULATOR,))
        await client.say("6*7?")
        client.tools = ()  # as one client asks for a summary
        await client.say("Summarise.")
        await Client(session, tools=(CALCULATOR,)).say("Summary: 42. Continue.")

    run(use)
    sample = session.sample(extra={})
    assert len(sample.segments) == 3
    assert all(segment.loss_mask is None for segment in sample.segments)
    assert [fact["parent"] for fact in sample.extra["calls"]] == [None, 0, None]


class Repeats:
    """A model that answers when told to, and counts how often it is asked."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self._model = Model(tokenizer, [f"answer {n}" for n in range(9)])

    async def generate(self, request: Request) -> Completion:
        self.asked += 1
        await self.go.wait()
        return await self._model.generate(request)


def with_repeats(tokenizer: HfTokenizer, **options: Any) -> tuple[Any, Repeats]:
    model = Repeats(tokenizer)
    session = make_session(Model(tokenizer, []), **options)
    session.answering.rollout = replace(session.answering.rollout, generate=model.generate)
    return session, model


REQUEST = Call(model="rollq", messages=({"role": "user", "content": "Hi"},))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_repeated_call_waits_for_the_one_under_way(tokenizer: HfTokenizer, marked: bool, streams: bool) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer)
        lost = Connection()
        ask(session, REQUEST, lost)
        await asyncio.sleep(0)
        lost.is_lost = not marked
        repeated = replace(REQUEST, repeats=int(marked), stream=streams)
        second = asyncio.ensure_future(serve(session, repeated))
        await asyncio.sleep(0)
        model.go.set()
        assert (await second).content == "answer 0"
        assert model.asked == 1
        assert len(session.sample(extra={}).segments) == 1

    run(use)


def test_an_answer_whose_stream_broke_is_given_again(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer)
        model.go.set()
        broken = Connection()
        assert (await ask(session, REQUEST, broken)).content == "answer 0"
        broken.is_lost = True
        assert (await serve(session, REQUEST)).content == "answer 0"
        assert (await serve(session, REQUEST)).content == "answer 1"  # that one was seen: this is a new call
        assert model.asked == 2

    run(use)


def test_a_repeat_of_a_call_that_is_being_given_up_is_a_new_call(tokenizer: HfTokenizer) -> None:
    class Slow(Repeats):
        async def generate(self, request: Request) -> Completion:
            try:
                return await super().generate(request)
            finally:
                if self.asked == 1:
                    await ended.wait()

    ended = asyncio.Event()

    async def use() -> None:
        session, _ = with_repeats(tokenizer, limits=SessionLimits(repeat_s=0.0))
        model = Slow(tokenizer)
        session.answering.rollout = replace(session.answering.rollout, generate=model.generate)
        lost = Connection()
        asking = ask(session, REQUEST, lost)
        while not model.asked:
            await asyncio.sleep(0)
        lost.is_lost = True
        session.calls.note_lost()
        await asyncio.sleep(0.01)
        model.go.set()
        assert (await serve(session, replace(REQUEST, repeats=1))).content == "answer 0"
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(use)


def test_a_client_that_came_back_is_expected_no_more(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_calls, "PLACE_S", 0.0)

    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=1))
        other = replace(REQUEST, messages=({"role": "user", "content": "Other"},))
        running = asyncio.ensure_future(serve(session, other))
        while not model.asked:
            await asyncio.sleep(0)
        with pytest.raises(CallRefused):
            await ask(session, REQUEST, Connection())
        model.go.set()
        await running
        assert (await ask(session, REQUEST, Connection())).content == "answer 1"
        assert (await ask(session, replace(REQUEST, repeats=1), Connection())).content == "answer 1"

    run(use)


def test_a_call_that_is_asked_again_after_an_error_has_another_seed(tokenizer: HfTokenizer) -> None:
    seeds: list[int | None] = []

    async def use() -> None:
        session, model = with_repeats(tokenizer)

        async def fails_once(request: Request) -> Completion:
            seeds.append(request.sampling.seed)
            if len(seeds) == 1:
                await model.go.wait()
                raise ValueError("no")
            return await model.generate(request)

        session.answering.rollout = replace(session.answering.rollout, generate=fails_once)
        first, second = (asyncio.ensure_future(serve(session, REQUEST)) for _ in range(2))
        while len(seeds) < 2:
            await asyncio.sleep(0)
        model.go.set()
        with pytest.raises(CallRefused):
            await first
        await asyncio.gather(second, serve(session, REQUEST))

    run(use)
    assert len(set(seeds)) == 3


def test_calls_between_do_not_change_which_answer_a_history_repeats(tokenizer: HfTokenizer) -> None:
    async def use(session: Any, others_first: bool) -> None:
        first = Client(session)
        await first.say("Hi")
        await first.say("so")
        await Client(session).say("Hi")  # answered with the same words
        calls = [partial(first.say, "last"), *(partial(Client(session).say, f"other {n}") for n in range(40))]
        for say in [*calls[1:], calls[0]] if others_first else calls:
            await say()

    recorded: list[Sample] = []
    run(lambda: use(make_session(Model(tokenizer, ["Yes"] * 44), recorded=recorded), False))
    again = make_session(Model(tokenizer, []), previous=as_stored(recorded), recorded=[])
    run(lambda: use(again, True))
    assert again.answering.replayed == 44


def test_equal_calls_at_the_same_time_are_all_trained_and_of_those_one_after_another_the_last(
    tokenizer: HfTokenizer,
) -> None:
    async def together() -> None:
        session, model = with_repeats(tokenizer)
        model.go.set()
        answers = await asyncio.gather(*(serve(session, REQUEST) for _ in range(3)))
        assert len({answer.number for answer in answers}) == 3
        assert len(session.sample(extra={}).segments) == 3

    async def in_turn() -> None:
        session, model = with_repeats(tokenizer)
        model.go.set()
        for _ in range(3):
            await serve(session, REQUEST)
        sample = session.sample(extra={})
        assert [fact["left_out"] for fact in sample.extra["calls"]] == ["superseded", "superseded", None]
        assert len(sample.segments) == 1
        assert sample.extra["left_out_tokens"] == 2 * len("answer 0") + 2

    run(together)
    run(in_turn)


def test_equal_calls_have_different_seeds_and_the_same_ones_in_the_next_attempt(tokenizer: HfTokenizer) -> None:
    def seeds() -> list[int | None]:
        model = Model(tokenizer, ["a", "b"])
        session = make_session(model)

        async def use() -> None:
            await serve(session, REQUEST)
            await serve(session, REQUEST)

        run(use)
        return [request.sampling.seed for request in model.requests]

    first = seeds()
    assert first == seeds()
    assert len(set(first)) == 2


def test_the_next_attempt_answers_from_the_record_and_samples_nothing(tokenizer: HfTokenizer) -> None:
    recorded: list[Sample] = []

    async def use(session: Any) -> list[str]:
        client = Client(session, tools=(CALCULATOR,))
        answer = await client.say("6*7?")
        client.messages += ({"role": "tool", "tool_call_id": answer.calls[0].id, "content": "42"},)
        return [answer.calls[0].id, (await client.ask()).content, (await client.say("Thanks")).content]

    model = Model(tokenizer, [SUM, "It is 42", "Bye"])
    first = make_session(model, recorded=recorded)
    said = run(lambda: use(first))
    whole = first.sample(extra={})
    for known in range(4):
        again = Model(tokenizer, [SUM, "It is 42", "Bye"][known:])
        log: list[Sample] = []
        previous = recorded[known - 1] if known else replace(recorded[0], segments=())
        session = make_session(again, previous=previous, recorded=log)
        assert run(partial(use, session)) == said
        assert len(again.requests) == 3 - known
        assert len(log) == 3 - known
        replayed = session.sample(extra={})
        assert text_of(tokenizer, replayed) == text_of(tokenizer, whole)
        assert replayed.extra.get("replayed_calls", 0) == known


def test_a_replay_that_diverges_drops_what_lies_beyond(tokenizer: HfTokenizer) -> None:
    recorded: list[Sample] = []

    async def use(session: Any, second: str) -> None:
        client = Client(session)
        await client.say("one")
        await client.say(second)

    run(lambda: use(make_session(Model(tokenizer, ["1", "2"]), recorded=recorded), "two"))
    model = Model(tokenizer, ["3"])
    log: list[Sample] = []
    session = make_session(model, previous=recorded[-1], recorded=log)
    run(lambda: use(session, "three"))
    sample = session.sample(extra={})
    assert text_of(tokenizer, sample) == ["user: one<eos>\nassistant: |1<eos>{\nuser: three<eos>\nassistant: }3<eos>"]
    assert (sample.extra["replayed_calls"], sample.extra["dropped_records"]) == (1, 1)
    assert len(log[-1].segments) == 3  # what is in the buffer already stays there


def test_an_interrupted_answer_continues_unless_the_group_is_stopped(tokenizer: HfTokenizer) -> None:
    model = Model(tokenizer, [tokenizer.encode("It is "), "42"])
    stop_reasons = iter([FinishReason.ABORT, FinishReason.STOP])

    async def generate(request: Request) -> Completion:
        return replace(await model.generate(request), finish_reason=next(stop_reasons))

    session = make_session(model)
    session.answering.rollout = replace(session.answering.rollout, generate=generate)
    answer = run(lambda: serve(session, REQUEST))
    assert answer.content == "It is 42"
    (segment,) = session.sample(extra={}).segments
    assert [tuple(span) for span in segment.versions] == [(1, 0, 6), (1, 1, 3)]
    prefix = model.requests[1].prefix_ids
    assert prefix is not None
    assert prefix.tolist() == tokenizer.encode("It is ")


def test_an_answer_that_cannot_be_recorded_is_never_seen(tokenizer: HfTokenizer) -> None:
    async def lose(_sample: Sample) -> bool:
        return False

    async def use() -> None:
        session = make_session(Model(tokenizer, ["secret"]))
        session.answering.rollout = replace(session.answering.rollout, record=lose)
        with pytest.raises(CallRefused, match="this session is over"):
            await serve(session, REQUEST)
        assert session.closed.is_set()
        assert session.answering.failure is not None

    run(use)


class ChangesShape(Model):
    """A model whose second answer has a named array of another shape."""

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        width = 1 + len(self.requests)
        return replace(completion, arrays={"routed": np.zeros((len(completion.ids), width), np.uint8)})


def test_an_answer_that_the_conversation_cannot_take_is_not_recorded(tokenizer: HfTokenizer) -> None:
    """The next attempt would fail in the same way, with what it takes from the record."""
    recorded: list[Sample] = []

    async def use() -> None:
        client = Client(make_session(ChangesShape(tokenizer, ["Yes", "No"]), recorded=recorded))
        await client.say("Sure?")
        with pytest.raises(ValueError, match="routed"):
            await client.say("Really?")

    run(use)
    assert len(recorded) == 1


LIMITS: list[tuple[SessionLimits, dict[str, Any], int, str]] = [
    (SessionLimits(max_calls=1), {}, 400, "too_many_calls"),
    (SessionLimits(max_made_tokens=2), {}, 400, "too_many_tokens"),
    (SessionLimits(), {"max_tokens": 20, "max_prompt_tokens": 40}, 400, CONTEXT_FULL),
]


@pytest.mark.parametrize(("limits", "lengths", "status", "code"), LIMITS)
def test_a_limit_refuses_the_next_call(
    tokenizer: HfTokenizer, limits: SessionLimits, lengths: dict[str, Any], status: int, code: str
) -> None:
    async def use() -> None:
        session = make_session(Model(tokenizer, ["Hello", "again"]), limits=limits, **lengths)
        client = Client(session)
        await client.say("Hi")
        with pytest.raises(CallRefused) as refused:
            await client.say("And now something longer")
        assert (refused.value.status, refused.value.code) == (status, code)

    run(use)


def test_a_call_that_has_waited_long_for_its_turn_is_told_to_come_again(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_calls, "PLACE_S", 0.0)

    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=1))
        first = asyncio.ensure_future(serve(session, REQUEST))
        await asyncio.sleep(0)
        with pytest.raises(CallRefused) as refused:
            await serve(session, replace(REQUEST, max_tokens=3))
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
        model.go.set()
        await first

    run(use)


def test_a_burst_of_calls_waits_its_turn(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=2, max_calls=6))
        asking = [asyncio.ensure_future(serve(session, replace(REQUEST, max_tokens=900 - n))) for n in range(6)]
        while model.asked < 2:
            await asyncio.sleep(0)
        with pytest.raises(CallRefused) as refused:  # those that wait count
            await serve(session, replace(REQUEST, max_tokens=100))
        assert refused.value.code == "too_many_calls"
        assert model.asked == 2
        assert session.calls.is_busy
        model.go.set()
        answers = await asyncio.gather(*asking)
        assert [answer.content for answer in answers] == [f"answer {n}" for n in range(6)]
        assert not session.calls.is_busy

    run(use)


def test_a_call_that_waits_is_refused_when_the_session_ends_or_has_made_its_tokens(tokenizer: HfTokenizer) -> None:
    async def use(*, closes: bool) -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=1, max_made_tokens=1))
        first = asyncio.ensure_future(serve(session, REQUEST))
        second = asyncio.ensure_future(serve(session, replace(REQUEST, max_tokens=900)))
        while not model.asked:
            await asyncio.sleep(0)
        if closes:
            session.close(Outcome(1.0))
        model.go.set()
        await first
        with pytest.raises(CallRefused) as refused:
            await second
        assert refused.value.code == ("session_over" if closes else "too_many_tokens")
        assert model.asked == 1

    run(partial(use, closes=True))
    run(partial(use, closes=False))


def test_a_stop_text_of_the_client_ends_the_answer_and_may_come_back(tokenizer: HfTokenizer) -> None:
    class Stops(Model):
        async def generate(self, request: Request) -> Completion:
            made = await super().generate(request)
            return (
                replace(made, ids=made.ids[:-1], logprobs=made.logprobs[:-1], versions=())
                if made.ids[-1] == 1
                else made
            )

    for sent_back in ("", "Observation:"):
        model = Model(tokenizer, [tokenizer.encode("Look. Observation:"), "Fine"])
        session = make_session(model)

        async def use(session: Any = session, sent_back: str = sent_back) -> None:
            client = Client(session)
            answer = await client.say("Go", stop=("Observation:",))
            assert (answer.content, answer.stop_text) == ("Look. ", "Observation:")
            client.messages = (*client.messages[:-1], {"role": "assistant", "content": answer.content + sent_back})
            await client.say("a result", stop=("Observation:",))

        run(use)
        sample = session.sample(extra={})
        assert [fact["parent"] for fact in sample.extra["calls"]] == [None, 0]


def test_completions_continue_each_other_by_their_text(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, [tokenizer.encode(" world"), tokenizer.encode("!")]))

    async def use() -> None:
        first = await serve(session, Call(model="rollq", text="Hello"))
        await serve(session, Call(model="rollq", text="Hello" + first.content + " and you"))

    run(use)
    assert text_of(tokenizer, session.sample(extra={})) == ["Hello| world{ and you}!"]


def test_the_reward_closes_the_session_and_may_come_again_but_not_change(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session = make_session(Model(tokenizer, ["Hello"]))
        await serve(session, REQUEST)
        assert session.close(Outcome(0.5, {"style": 0.5}))
        assert session.close(Outcome(0.5, {"style": 0.5}))
        assert not session.close(Outcome(0.75))
        assert not session.close(Outcome())
        with pytest.raises(CallRefused, match="over"):
            await serve(session, REQUEST)
        sample = session.sample(extra={})
        assert (sample.reward, sample.reward_parts) == (0.5, {"style": 0.5})

    run(use)


def test_a_session_without_a_call_fails_and_has_no_reward(tokenizer: HfTokenizer) -> None:
    sample = make_session(Model(tokenizer, [])).sample(extra={})
    assert (sample.status, sample.reward) == (SampleStatus.FAILED, None)


def test_calls_that_are_not_chosen_are_left_out_and_counted(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, ["A title", "Work"]))
    session._chosen = lambda facts: facts["messages"][0]["content"] != "Title?"

    async def use() -> None:
        await Client(session).say("Title?")
        await Client(session).say("Task")

    run(use)
    sample = session.sample(extra={})
    assert text_of(tokenizer, sample) == ["user: Task<eos>\nassistant: |Work<eos>"]
    assert sample.extra["left_out_tokens"] == len("A title") + 1


def test_an_answer_that_others_build_on_is_left_out_of_the_loss_alone(tokenizer: HfTokenizer) -> None:
    session = make_session(Model(tokenizer, ["Plan", "Work"]))
    session._chosen = lambda facts: facts["number"] == 1

    async def use() -> None:
        client = Client(session)
        await client.say("Plan?")
        await client.say("Do it")

    run(use)
    sample = session.sample(extra={})
    assert text_of(tokenizer, sample) == [
        "user: Plan?<eos>\nassistant: |{Plan<eos>\nuser: Do it<eos>\nassistant: }Work<eos>"
    ]


def test_as_message_is_how_clients_send_answers_back(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    session = make_session(Model(tokenizer, [SUM]))
    answer = run(lambda: Client(session, tools=(CALCULATOR,)).say("6*7?"))
    assert as_message(answer)["tool_calls"][0]["function"]["arguments"] == '{"expression":"6*7"}'


def test_a_sample_that_another_agent_loop_began_starts_anew(tokenizer: HfTokenizer) -> None:
    first = make_session(Model(tokenizer, ["Hi"]))
    run(lambda: Client(first).say("Hello"))
    previous = replace(first.sample(extra={}), status=SampleStatus.ABORTED)
    log: list[Sample] = []
    session = make_session(Model(tokenizer, ["Hey"]), previous=previous, recorded=log)
    run(lambda: Client(session).say("Hello"))
    assert text_of(tokenizer, session.sample(extra={})) == ["user: Hello<eos>\nassistant: |Hey<eos>"]
    assert len(log[-1].segments) == 2  # what the buffer has stays there


def test_results_in_another_order_are_the_same_request(tokenizer: HfTokenizer) -> None:
    both = call("calculator", expression="6*7") + call("calculator", expression="2*3")

    def results(session: Any, *order: int) -> str:
        client = Client(session, tools=(CALCULATOR,))

        async def use() -> str:
            answer = await client.say("?")
            found = [
                {"role": "tool", "tool_call_id": made.id, "content": text}
                for made, text in zip(answer.calls, ("42", "6"), strict=True)
            ]
            client.messages += tuple(found[place] for place in order)
            return (await client.ask()).content

        return run(use)

    recorded: list[Sample] = []
    first = make_session(Model(tokenizer, [both, "Done"]), recorded=recorded)
    assert results(first, 1, 0) == "Done"
    (text,) = text_of(tokenizer, first.sample(extra={}))
    assert text.index("tool: 42") < text.index("tool: 6")
    replayed = make_session(Model(tokenizer, []), previous=recorded[-1], recorded=[])
    assert results(replayed, 0, 1) == "Done"


HI: tuple[Message, ...] = ({"role": "user", "content": "Hi"},)


def with_arguments(arguments: str) -> Message:
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Call(model="m", messages=({"role": "user", "content": "x"},) * 10_001), "10001 messages, more than 10000"),
        (Call(model="m", text="x" * 300_000), "prompt is too long: 2343 tokens > 2000 maximum"),
        (Call(model="m", ids=(5,) * 2001), "prompt is too long: 2001 tokens > 2000 maximum"),
        (Call(model="m", messages=HI, tools=({"name": "x" * 1000},) * 300), "prompt is too long: 23"),
        (Call(model="m", messages=(with_arguments("x" * 300_000), *HI)), "prompt is too long: 23"),
    ],
)
def test_what_would_occupy_the_worker_is_refused_at_once(tokenizer: HfTokenizer, given: Call, words: str) -> None:
    session = make_session(Model(tokenizer, []))
    with pytest.raises(CallRefused, match=words):
        run(lambda: serve(session, given))
    assert not session.tree._continuing


def test_a_segment_without_room_for_a_token_is_refused_with_its_limit(tokenizer: HfTokenizer) -> None:
    async def work() -> None:
        client = Client(make_session(Model(tokenizer, ["Yes", "No"]), max_tokens=40, max_prompt_tokens=100))
        await client.say("Hi")
        prompt = len(tokenizer.encode("user: Hi<eos>\nassistant: "))
        with pytest.raises(CallRefused, match=rf"prompt is too long: \d+ tokens > {prompt + 39} maximum") as refused:
            await client.say("r" * 20)
        tokens = int(str(refused.value).split()[4])
        assert tokens > prompt + 39

    run(work)


def test_a_completion_that_continues_one_without_new_words_is_recorded(tokenizer: HfTokenizer) -> None:
    async def use(session: Any) -> str:
        first = await serve(session, Call(model="m", text="Hello", max_tokens=3))
        return (await serve(session, Call(model="m", text="Hello" + first.content))).content

    recorded: list[Sample] = []
    first = make_session(Model(tokenizer, [tokenizer.encode(" wo"), tokenizer.encode("rld")]), recorded=recorded)
    assert run(partial(use, first)) == "rld"
    again = make_session(Model(tokenizer, []), previous=as_stored(recorded), recorded=[])
    assert run(partial(use, again)) == "rld"
    assert text_of(tokenizer, again.sample(extra={})) == ["Hello| world"]


def test_a_group_that_is_stopped_while_a_call_is_answered_does_not_fail(tokenizer: HfTokenizer) -> None:
    stopped = False

    async def refuse(_sample: Sample) -> bool:  # as a held lease does once its group is being stopped
        nonlocal stopped
        stopped = True
        return False

    async def use() -> None:
        session = make_session(Model(tokenizer, ["Hello"]))
        rollout = replace(session.answering.rollout, record=refuse, is_stopped=lambda: stopped)
        session.answering.rollout = rollout
        with pytest.raises(CallRefused, match="this session is over"):
            await serve(session, REQUEST)
        assert session.answering.failure is None
        assert len(session.answering.so_far().segments) == 1

    run(use)


def test_subagents_that_ask_in_another_order_are_answered_from_the_record(tokenizer: HfTokenizer) -> None:
    async def use(session: Any, *order: str) -> None:
        main = Client(session)
        await main.say("Task")
        for name in order:
            agent = Client(session, main.messages)
            answer = await agent.say(name)
            assert answer.content == f"I am {name}"
            assert (await agent.say("more")).content == f"more of {name}"

    recorded: list[Sample] = []
    words = ["Main", "I am a", "more of a", "I am b", "more of b"]
    first = make_session(Model(tokenizer, words), recorded=recorded)
    run(partial(use, first, "a", "b"))
    again = make_session(Model(tokenizer, []), previous=as_stored(recorded), recorded=[])
    run(partial(use, again, "b", "a"))
    sample = again.sample(extra={})
    assert sample.extra["replayed_calls"] == 5
    assert trained_tokens(sample) == sum(fact["tokens"] for fact in sample.extra["calls"])


def test_no_call_has_the_number_of_a_recorded_one(tokenizer: HfTokenizer) -> None:
    recorded: list[Sample] = []
    first = make_session(Model(tokenizer, ["a", "b"]), recorded=recorded)

    async def stopped_between() -> None:
        client = Client(first)
        await client.say("one")
        first.answering._next_number += 1  # a call that was stopped once it was made, before it was recorded
        await client.say("two")

    run(stopped_between)
    again = make_session(Model(tokenizer, ["c"]), previous=recorded[-1], recorded=[])

    async def use() -> list[int]:
        client = Client(again)
        return [(await client.say(text)).number for text in ("one", "two", "three")]

    assert run(use) == [0, 2, 3]


def test_a_call_that_was_told_to_come_again_is_no_repeat(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_calls, "PLACE_S", 0.0)

    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=1))
        first = asyncio.ensure_future(serve(session, REQUEST))
        await asyncio.sleep(0)
        with pytest.raises(CallRefused, match=r"one of the 1 that this session runs at a time \(parallel_calls\)"):
            await serve(session, REQUEST)
        model.go.set()
        await first
        assert (await serve(session, replace(REQUEST, repeats=1))).content == "answer 1"
        assert (await serve(session, replace(REQUEST, repeats=1))).content == "answer 1"  # this one is
        assert model.asked == 2

    run(use)


def test_a_call_that_is_stopped_while_it_is_tokenised_leaves_no_trace(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session = make_session(Model(tokenizer, ["Yes", "Sure"]), max_prompt_tokens=10**6)
        client = Client(session)
        await client.say("Really?")
        large = Call(model="m", messages=(*client.messages, {"role": "user", "content": "x" * 200_000}))
        asking = ask(session, large, Connection())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.get_running_loop().shutdown_default_executor()
        await client.say("Sure?")
        assert len(session.sample(extra={}).segments) == 1

    run(use)


def test_a_long_session_keeps_its_text_and_tokens_once(tokenizer: HfTokenizer) -> None:
    def kept(calls: int) -> int:
        """Bytes that are held after so many calls, each of which adds as much."""

        async def work() -> int:
            model = Model(tokenizer, ["Yes"] * calls)
            client = Client(make_session(model, max_tokens=100_000))
            tracemalloc.start()
            try:
                for _ in range(calls):
                    client.messages = tuple(dict(message) for message in client.messages)  # parsed anew
                    await client.say("r" * 400)
                    model.requests = model.requests[:1] * len(model.requests)  # the model keeps none
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

        return run(work)

    kept(2)  # what is imported and cached once
    assert kept(80) < 3 * kept(40)  # four times as much if every call kept all that came before


def test_a_history_that_was_recognised_is_not_hashed_again(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Message] = []

    def noted(history: bytes, message: Message) -> bytes:
        hashed.append(message)
        return after_message(history, message)

    monkeypatch.setattr(answered_calls, "after_message", noted)

    async def work() -> None:
        client = Client(make_session(Model(tokenizer, ["Yes"] * 4)))
        for number in range(4):
            await client.say(str(number))
        assert [message["content"] for message in hashed] == ["0", "1", "2", "3"]

    run(work)


def test_an_earlier_answer_can_be_continued_after_a_later_one(tokenizer: HfTokenizer) -> None:
    async def work() -> Sample:
        session = make_session(Model(tokenizer, ["One", "Two", "Three", "Four", "Else"]))
        client = Client(session)
        for number in range(2):
            await client.say(str(number))
        earlier = client.messages
        for number in range(2, 4):
            await client.say(str(number))
        await Client(session, earlier).say("or")
        return session.sample(extra={})

    first, second = text_of(tokenizer, run(work))
    assert first.count("assistant: ") == 4
    earlier = "user: 0<eos>\nassistant: One<eos>\nuser: 1<eos>\nassistant: Two<eos>\n"
    assert second == f"{earlier}user: or<eos>\nassistant: |Else<eos>"


def test_a_client_that_was_told_to_come_again_and_never_does_is_forgotten(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_calls, "RETURN_S", 0.0)
    monkeypatch.setattr(asked_calls, "PLACE_S", 0.0)

    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(parallel_calls=1))
        other = replace(REQUEST, messages=({"role": "user", "content": "Other"},))
        running = asyncio.ensure_future(serve(session, other))
        await asyncio.sleep(0)
        with pytest.raises(CallRefused):
            await serve(session, REQUEST)
        model.go.set()
        await running
        answer = await serve(session, REQUEST)
        assert (await serve(session, replace(REQUEST, repeats=1))).number == answer.number
        assert model.asked == 2

    run(use)


def test_a_call_that_nobody_waits_for_has_one_clock_which_a_repeat_stops(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        session, _ = with_repeats(tokenizer)
        loop, clocks = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        call_later = loop.call_later

        def noted(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            clocks.append(call_later(delay, *args, **options))
            return clocks[-1]

        monkeypatch.setattr(loop, "call_later", noted)
        for _ in range(3):
            caller = Connection()
            ask(session, REQUEST, caller)
            await asyncio.sleep(0)
            assert all(clock.cancelled() for clock in clocks)
            caller.is_lost = True
            for _ in range(3):
                session.calls.note_lost()
        assert [clock.cancelled() for clock in clocks] == [True, True, False]
        await session.stop()

    run(use)


def with_slow_record(session: Session) -> tuple[asyncio.Event, asyncio.Event]:
    """Make a session record its answers slowly: it sets the first event when it begins, and ends with the second."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def record(_sample: Sample) -> bool:
        begun.set()
        await go.wait()
        return True

    session.answering.rollout = replace(session.answering.rollout, record=record)
    return begun, go


def test_a_call_whose_client_is_lost_while_it_is_recorded_is_answered(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(repeat_s=0.0))
        begun, go, recorded = asyncio.Event(), asyncio.Event(), list[Sample]()

        async def record(sample: Sample) -> bool:
            recorded.append(sample)
            begun.set()
            await go.wait()
            return True

        session.answering.rollout = replace(session.answering.rollout, record=record)
        model.go.set()
        caller = Connection()
        asking = ask(session, REQUEST, caller)
        await begun.wait()
        caller.is_lost = True
        session.calls.note_lost()
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait([asking])
        assert (await serve(session, REQUEST)).content == "answer 0"
        assert (model.asked, len(recorded)) == (1, 1)

    run(use)


def test_a_call_that_is_being_recorded_counts_once(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(max_calls=2))
        begun, go = with_slow_record(session)
        model.go.set()
        first = asyncio.ensure_future(serve(session, REQUEST))
        await begun.wait()
        second = asyncio.ensure_future(serve(session, replace(REQUEST, max_tokens=900)))
        await asyncio.sleep(0)
        with pytest.raises(CallRefused) as refused:
            await serve(session, replace(REQUEST, max_tokens=800))
        assert refused.value.code == "too_many_calls"
        go.set()
        assert [(await asked).content for asked in (first, second)] == ["answer 0", "answer 1"]

    run(use)


def test_a_call_that_is_stopped_while_it_is_recorded_is_one_of_the_samples_calls(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer)
        begun, _ = with_slow_record(session)
        model.go.set()
        asking = asyncio.ensure_future(serve(session, REQUEST))
        await begun.wait()
        await session.stop()
        await asyncio.gather(asking, return_exceptions=True)
        (facts,) = session.sample(extra={}).extra["calls"]
        assert facts["left_out"] == "unseen"

    run(use)


def test_the_tokens_of_a_call_that_is_being_recorded_count(tokenizer: HfTokenizer) -> None:
    async def use() -> None:
        session, model = with_repeats(tokenizer, limits=SessionLimits(max_made_tokens=1))
        begun, go = with_slow_record(session)
        model.go.set()
        first = asyncio.ensure_future(serve(session, REQUEST))
        await begun.wait()
        with pytest.raises(CallRefused) as refused:
            await serve(session, replace(REQUEST, max_tokens=800))
        assert refused.value.code == "too_many_tokens"
        go.set()
        await first

    run(use)


def test_the_conversation_of_an_earlier_answer_stays_as_it_was(tokenizer: HfTokenizer) -> None:
    def facts(node: call_nodes.Node) -> Any:
        conversation = node.conversation
        tokens = [
            (
                segment.response_ids.tolist(),
                segment.logprobs.tolist(),
                segment.versions,
                np.asarray(segment.arrays["routed"]).tolist(),
            )
            for segment in conversation.segments
        ]
        return conversation.messages, conversation.rendered, conversation.context.tolist(), tokens

    async def work() -> None:
        session = make_session(Model(tokenizer, ["One", "Two", "Three"], arrays=True))
        client, then = Client(session), []
        for number in range(3):
            await client.say(str(number))
            then.append(facts(session.tree.answered.nodes[-1]))
        assert [facts(node) for node in session.tree.answered.nodes] == then

    run(work)

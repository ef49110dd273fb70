"""Environments: their turns, their limits, and that they are always torn down."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.credit import last_tokens
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, FinishReason, Prompt, Sample, SampleStatus, Status
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Environments, Limits, Opening, Step
from rollq.workers.agents.loops import AgentLoop, is_resumable, sessions
from rollq.workers.engines.protocol import EngineDead
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.run import Worker
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, chat_tokenizer, converse, rollout
from support.worker_run import Script, WorkerWorld, age_leases


@dataclass
class Seen:
    """What environments went through; `hang` names the call that never returns, `fail` the one that raises, `lose` the
    one that awaits something that was cancelled."""

    calls: list[str] = field(default_factory=list)
    alive: int = 0
    most: int = 0
    hang: str = ""
    fail: str = ""
    error: type[BaseException] = RuntimeError
    lose: str = ""
    stubborn: bool = False  # does not even end when it is cancelled
    let_go: asyncio.Event | None = None
    happened: Callable[[str], None] = lambda call: None


SEEN = Seen()


@pytest.fixture(autouse=True)
def seen() -> Seen:
    """A fresh record."""
    SEEN.__init__()  # type: ignore[misc]
    return SEEN


class Guess:
    """Guess a number: says higher or lower. Needs no tools."""

    def __init__(self, number: int = 5) -> None:
        self.number = number

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        await self._note("setup")
        SEEN.alive += 1
        SEEN.most = max(SEEN.most, SEEN.alive)
        return Opening(({"role": "user", "content": "guess"},))

    async def step(self, text: str) -> Step:
        await self._note("step")
        guess = int(text)
        if guess == self.number:
            return Step(({"role": "user", "content": "yes"},), done=True, reward=1.0)
        return Step(({"role": "user", "content": "lower" if guess > self.number else "higher"},), reward=-0.25)

    async def teardown(self) -> None:
        SEEN.alive -= 1
        await self._note("teardown")

    async def _note(self, call: str) -> None:
        SEEN.calls.append(call)
        SEEN.happened(call)
        if SEEN.fail == call:
            raise SEEN.error(f"{call} is out of order")
        if SEEN.lose == call:
            lost = asyncio.ensure_future(asyncio.sleep(20))
            lost.cancel()
            await lost
        if SEEN.hang == call:
            SEEN.let_go = asyncio.Event()
            while not SEEN.let_go.is_set():
                try:
                    await SEEN.let_go.wait()
                except asyncio.CancelledError:
                    if not SEEN.stubborn:
                        raise
        else:
            await asyncio.sleep(0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> HfTokenizer:
    return chat_tokenizer(tmp_path)


def guessing(**options: Any) -> AgentLoop:
    return make_loop("environment", {"environment": f"{__name__}.Guess", **options})


def test_model_and_environment_take_turns_until_it_is_done(tokenizer: HfTokenizer, seen: Seen) -> None:
    sample = converse(guessing(options={"number": 7}), Model(tokenizer, ["9", "3", "7"]))
    [segment] = sample.segments
    assert tokenizer.decode(segment.prompt_ids.tolist()) == "user: 6*7?\nuser: guess\nassistant: "
    assert tokenizer.decode(segment.response_ids.tolist()) == (
        "9\nuser: lower\nassistant: 3\nuser: higher\nassistant: 7"
    )
    assert (sample.status, sample.finish_reason, sample.text) == (SampleStatus.COMPLETED, FinishReason.STOP, "7")
    assert sample.extra["environment_reward"] == 0.5
    assert sample.extra["turn_rewards"] == [-0.25, -0.25, 1.0]
    assert sample.extra["messages"][-1] == {"role": "user", "content": "yes"}
    assert (sample.tools, sample.tool_choice) == ((), None)
    assert seen.calls == ["setup", "step", "step", "step", "teardown"]


def test_a_sample_without_rewards_of_an_environment_cannot_be_judged_by_them() -> None:
    judge = make_judge("environment", {}, JudgeContext(1.0, JudgePool(1)))
    verdict = asyncio.run(judge.judge(Prompt("x"), EMPTY_SAMPLE))
    assert verdict.error is not None
    assert "no rewards of an environment" in verdict.error


def test_turns_that_run_out_end_the_sample_as_truncated(tokenizer: HfTokenizer, seen: Seen) -> None:
    sample = converse(guessing(max_turns=2), Model(tokenizer, ["9", "3"]))
    assert sample.finish_reason is FinishReason.LENGTH
    assert sample.extra["environment_reward"] == -0.5
    assert seen.calls[-1] == "teardown"


def test_a_first_turn_that_is_cut_off_has_earned_nothing(tokenizer: HfTokenizer, seen: Seen) -> None:
    sample = converse(guessing(), Model(tokenizer, ["1000000"]), max_tokens=3)
    assert sample.finish_reason is FinishReason.LENGTH
    assert sample.extra["environment_reward"] == 0.0
    assert sample.extra["turn_rewards"] == [0.0]
    assert seen.calls == ["setup", "teardown"]


class Silent:
    """An environment that gives no reward, with tools or without."""

    def __init__(self, tools: bool = False, done_after: int = 100) -> None:
        definition = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
        self.opening = Opening(tools=(definition,) if tools else ())
        self.left = done_after

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        return self.opening

    async def step(self, text: str) -> Step:
        self.left -= 1
        return Step(({"role": "user", "content": "go on"},), done=not self.left)

    async def teardown(self) -> None:
        pass


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("unfinished", "max_turns", "max_tokens"), [(-0.5, 2, 1000), (0, 2, 1000), (2.0, 8, 20)])
def test_a_sample_that_runs_out_has_earned_what_the_settings_say(
    tokenizer: HfTokenizer, tools: bool, unfinished: float, max_turns: int, max_tokens: int
) -> None:
    options = {"environment": f"{__name__}.Silent", "options": {"tools": tools}, "max_turns": max_turns}
    loop = make_loop("environment", {**options, "unfinished": unfinished})
    sample = converse(loop, Model(tokenizer, ["9"] * 8), max_tokens=max_tokens)
    assert sample.finish_reason is FinishReason.LENGTH
    assert sample.extra["environment_reward"] == unfinished
    assert sample.extra["turn_rewards"][-1] == sum(sample.extra["turn_rewards"]) == unfinished
    judge = make_judge("environment", {"turn_rewards": True}, JudgeContext(1.0, JudgePool(1)))
    assert asyncio.run(judge.judge(Prompt("x"), sample)).reward == unfinished


@pytest.mark.parametrize("tools", [False, True])
def test_a_sample_that_runs_out_can_fail(tokenizer: HfTokenizer, tools: bool) -> None:
    options = {"environment": f"{__name__}.Silent", "options": {"tools": tools}, "unfinished": "fail"}
    with pytest.raises(SampleFailed, match="it took max_turns = 2 without a reward") as turns:
        converse(make_loop("environment", {**options, "max_turns": 2}), Model(tokenizer, ["9"] * 8))
    with pytest.raises(SampleFailed, match="ran out of tokens before it had a reward") as tokens:
        converse(make_loop("environment", options), Model(tokenizer, ["9"] * 8), max_tokens=20)
    assert (turns.value.kind, tokens.value.kind) == (FailureKind.ENVIRONMENT, FailureKind.CONTEXT)


def test_what_was_earned_before_turns_ran_out_is_kept(tokenizer: HfTokenizer, seen: Seen) -> None:
    sample = converse(guessing(max_turns=2, unfinished="fail"), Model(tokenizer, ["9", "3"]))
    assert sample.extra["environment_reward"] == -0.5


def test_an_environment_that_ends_without_a_reward_needs_another_judge(tokenizer: HfTokenizer) -> None:
    loop = make_loop("environment", {"environment": f"{__name__}.Silent", "options": {"done_after": 1}})
    sample = converse(loop, Model(tokenizer, ["9"]))
    assert "environment_reward" not in sample.extra
    assert sample.reward is None


class Sparse(Silent):
    """An environment that rewards the second turn alone."""

    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return replace(step, reward=-0.25) if self.left == 98 else step


@pytest.mark.parametrize(("turns", "max_tokens"), [(4, 1000), (8, 85)])
def test_a_turn_without_a_reward_leaves_the_others_in_their_places(
    tokenizer: HfTokenizer, turns: int, max_tokens: int
) -> None:
    loop = make_loop("environment", {"environment": f"{__name__}.Sparse", "max_turns": turns})
    sample = converse(loop, Model(tokenizer, ["9"] * 8), max_tokens=max_tokens)
    rewards = sample.extra["turn_rewards"]
    assert (rewards[:2], set(rewards[2:])) == ([0.0, -0.25], {0.0})
    judge = make_judge("environment", {"turn_rewards": True}, JudgeContext(1.0, JudgePool(1)))
    verdict = asyncio.run(judge.judge(Prompt("x"), sample))
    assert verdict.token_rewards is not None
    ends = last_tokens(sample.segments, "turns")
    assert len(ends) == len(rewards) > 2
    assert verdict.token_rewards[ends].tolist() == rewards


@pytest.mark.parametrize("unfinished", ["judge", "nan", float("nan"), True])
def test_only_a_number_or_fail_is_an_end(unfinished: object) -> None:
    with pytest.raises(ConfigError, match="unfinished"):
        make_loop("environment", {"environment": f"{__name__}.Silent", "unfinished": unfinished})


class Limited(Guess):
    """Accepts even numbers only, and ends after its second step."""

    async def step(self, text: str) -> Step:
        done = len(SEEN.calls) > 1
        return replace(await super().step(text), done=done, truncated=done, invalid=int(text) % 2)


def test_an_environment_may_cut_an_episode_off_and_refuse_actions(tokenizer: HfTokenizer, seen: Seen) -> None:
    loop = make_loop("environment", {"environment": f"{__name__}.Limited"})
    sample = converse(loop, Model(tokenizer, ["1", "3"]))
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, FinishReason.LENGTH)
    assert sample.extra["invalid_actions"] == 2
    assert sample.extra["environment_reward"] == -0.5


def test_an_environment_that_waits_says_for_whom(tokenizer: HfTokenizer, seen: Seen) -> None:
    class Waiting(Guess):
        waits_for = "the landlord"

    seen.hang = "setup"
    environments = Environments(Waiting, Limits(max_turns=1, setup_s=0.1))

    async def setup() -> None:
        async with environments.open() as environment:
            await environments.setup(environment, Prompt("?"), "session")

    with pytest.raises(SampleFailed, match=r"the environment's setup took longer than 0.1 s: the landlord"):
        asyncio.run(setup())


@pytest.mark.parametrize("call", ["setup", "step"])
def test_an_environment_that_fails_costs_its_sample_and_is_torn_down(
    tokenizer: HfTokenizer, seen: Seen, call: str
) -> None:
    seen.fail = call
    with pytest.raises(SampleFailed, match=f"RuntimeError: {call} is out of order"):
        converse(guessing(), Model(tokenizer, ["9"]))
    assert seen.calls[-1] == "teardown"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("setup", r"the environment's setup returned None; expected Opening"),
        ("step", r"a step of the environment returned None; expected Step"),
    ],
)
def test_what_an_environment_returns_is_checked(
    tokenizer: HfTokenizer, seen: Seen, monkeypatch: pytest.MonkeyPatch, call: str, problem: str
) -> None:
    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(Guess, call, nothing)
    with pytest.raises(SampleFailed, match=f"^{problem}$") as failed:
        converse(guessing(), Model(tokenizer, ["9"]))
    assert failed.value.kind is FailureKind.ENVIRONMENT
    assert seen.calls[-1] == "teardown"


@pytest.mark.parametrize(("call", "words"), [("setup", "the environment's setup"), ("step", "a step of the")])
def test_an_environment_that_hangs_costs_its_sample_after_its_time(
    tokenizer: HfTokenizer, seen: Seen, call: str, words: str
) -> None:
    seen.hang = call
    with pytest.raises(SampleFailed, match=rf"{words}.* took longer than 0.01 s"):
        converse(guessing(**{f"{call}_timeout_s": 0.01}), Model(tokenizer, ["9"]))
    assert seen.calls[-1] == "teardown"


def test_a_step_that_does_not_even_end_when_it_is_cancelled_costs_its_sample_after_its_time(
    tokenizer: HfTokenizer, seen: Seen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.workers.user_code.calls.LET_GO_S", 0.01)
    seen.hang, seen.stubborn = "step", True

    async def scene() -> None:
        with pytest.raises(SampleFailed, match=r"a step of the environment took longer than 0\.01 s"):
            await guessing(step_timeout_s=0.01).run(rollout(Model(tokenizer, ["9"]), Prompt("x")))
        assert seen.calls[-1] == "teardown"
        assert seen.let_go is not None
        seen.let_go.set()

    asyncio.run(scene())
    assert "ignores its cancellation and is abandoned" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_teardown_that_fails_costs_nothing(
    tokenizer: HfTokenizer, seen: Seen, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    seen.fail, seen.error = "teardown", error
    sample = converse(guessing(), Model(tokenizer, ["5"]))
    assert sample.status is SampleStatus.COMPLETED
    assert "an environment could not be torn down" in caplog.text
    assert "teardown is out of order" in caplog.text


def test_a_teardown_that_hangs_is_left_to_itself(
    tokenizer: HfTokenizer, seen: Seen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.workers.agents.environments.TEARDOWN_S", 0.01)
    seen.hang, seen.stubborn = "teardown", True

    async def scene() -> Sample:
        sample = await guessing().run(rollout(Model(tokenizer, ["5"]), Prompt("x")))
        assert seen.let_go is not None
        seen.let_go.set()
        return sample

    assert asyncio.run(scene()).status is SampleStatus.COMPLETED
    assert "an environment was not torn down within 0.01 s" in caplog.text


@pytest.mark.parametrize("call", ["setup", "step", "teardown"])
def test_a_cancelled_sample_is_torn_down_to_the_end(tokenizer: HfTokenizer, seen: Seen, call: str) -> None:
    """Cancelled again and again, as a worker that stops may do; the teardown takes a few steps of the loop."""
    ended: list[str] = []
    original = Guess.teardown

    class Slow(Guess):
        async def teardown(self) -> None:
            await original(self)
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append("torn down")

    async def scene() -> None:
        loop = guessing()
        object.__setattr__(loop.environments, "make", Slow)  # type: ignore[attr-defined]
        reached = asyncio.Event()
        seen.happened = lambda what: reached.set() if what == call else None
        running = asyncio.create_task(loop.run(rollout(Model(tokenizer, ["5"]), Prompt("x"))))
        await reached.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == ["torn down"]

    asyncio.run(scene())
    assert seen.alive in (0, -1)  # -1: its setup did not get to the end, and it was torn down all the same


def test_the_death_of_the_engine_gets_through_after_the_teardown(tokenizer: HfTokenizer, seen: Seen) -> None:
    class Dying(Model):
        async def generate(self, request: Any) -> Any:
            raise EngineDead("gone")

    with pytest.raises(EngineDead):
        converse(guessing(), Dying(tokenizer, []))
    assert seen.calls == ["setup", "teardown"]


def test_the_loop_says_how_many_environments_may_live_at_a_time() -> None:
    assert sessions(guessing(concurrent=2)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "environment: is required, but missing"),
        ({"environment": f"{__name__}.Nowhere"}, f"environment '{__name__}.Nowhere'"),
        ({"environment": f"{__name__}.Guess", "options": {"numbr": 1}}, "cannot be made with options"),
        (
            {"environment": f"{__name__}.Seen"},
            "Seen has no setup, step, teardown; expected async def setup(self, prompt, session) -> Opening",
        ),
    ],
)
def test_environments_that_cannot_be_made_are_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("environment", options)
    assert words in str(refused.value)


class Remembering(Guess):
    """Can take up the conversation of another one."""

    async def resume(self, prompt: Prompt, session: str, messages: Sequence[Message]) -> Opening:
        SEEN.calls.append(f"resume after {[message['content'] for message in messages]}")
        SEEN.alive += 1
        return Opening(({"role": "user", "content": "guess"},))


def test_an_environment_that_can_resume_continues_after_the_last_whole_turn(tokenizer: HfTokenizer, seen: Seen) -> None:
    loop = make_loop("environment", {"environment": f"{__name__}.Remembering"})
    assert (is_resumable(loop), is_resumable(guessing())) == (True, False)
    interrupted = converse(loop, Model(tokenizer, ["9", "3", FinishReason.ABORT]))
    assert interrupted.status is SampleStatus.ABORTED
    first = Model(tokenizer, ["9", "3", "5"])
    again = replace(rollout(Model(tokenizer, ["9", "3", "5"], list(range(2))), Prompt("6*7?")), previous=interrupted)  # type: ignore[arg-type]
    continued, whole = asyncio.run(loop.run(again)), converse(loop, first)
    assert continued.segments[0].response_ids.tolist() == whole.segments[0].response_ids.tolist()
    assert continued.segments[0].versions == whole.segments[0].versions
    assert (continued.extra, continued.text) == (whole.extra, "5")
    assert continued.extra["turn_rewards"] == [-0.25, -0.25, 1.0]
    assert "resume after ['9', 'lower', '3', 'higher']" in seen.calls
    assert (seen.alive, seen.calls.count("teardown")) == (0, 3)


def test_a_conversation_that_an_earlier_release_kept_has_its_rewards_on_the_last_turn(
    tokenizer: HfTokenizer, seen: Seen
) -> None:
    loop = make_loop("environment", {"environment": f"{__name__}.Remembering"})
    kept = converse(loop, Model(tokenizer, ["9", "3", FinishReason.ABORT]))
    older = replace(kept, extra={name: value for name, value in kept.extra.items() if name != "turn_rewards"})
    continuing = Model(tokenizer, ["9", "3", "5"], list(range(2)))  # type: ignore[arg-type]
    continued = asyncio.run(loop.run(replace(rollout(continuing, Prompt("6*7?")), previous=older)))
    assert continued.extra["environment_reward"] == 0.5
    assert continued.extra["turn_rewards"] == [0.0, -0.5, 1.0]


def test_a_turn_that_is_cut_off_has_earned_nothing(tokenizer: HfTokenizer, seen: Seen) -> None:
    sample = converse(guessing(), Model(tokenizer, ["9", "1" * 900]), max_tokens=100)
    assert sample.finish_reason is FinishReason.LENGTH
    assert sample.extra["turn_rewards"] == [-0.25, 0.0]


# in a worker

LOOP = {
    "judge": "environment",
    "agent_loop": "environment",
    "agent_options": {"environment": f"{__name__}.Guess"},
}


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url, {"partial_rollout": True, **LOOP})


def test_a_group_whose_lease_is_lost_is_torn_down(
    world: WorkerWorld, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: seen.calls.count("step") == 2)
        [held] = worker.table
        world.buffer.hand_back([held.lease])
        age_leases(world.task.lease_s / 2, monkeypatch)
        await world.until(lambda: seen.calls.count("teardown") == 2)
        await world.until(lambda: len(worker.table) == 0)

    seen.hang = "step"
    world.admit(1)
    world.play(scene, answer="9")
    assert seen.alive == 0
    assert world.count(Status.PENDING) == 1


def test_an_environment_whose_own_work_was_cancelled_costs_its_sample(world: WorkerWorld, seen: Seen) -> None:
    """A timeout does not look like a stopped group, which would be handed back, uncounted, again and again."""

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 1)

    seen.lose = "step"
    world.admit(1)
    world.play(scene, answer="9")
    assert world.error(1).startswith("a step of the environment: RuntimeError: it was cancelled from within (tests/")
    assert seen.calls.count("teardown") == 2


def test_a_worker_that_stops_tears_down_what_it_holds(world: WorkerWorld, seen: Seen) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: seen.calls.count("step") == 2)

    seen.hang = "step"
    world.admit(1)
    world.play(scene, answer="9", grace_s=0.1)
    assert seen.calls.count("teardown") == 2
    assert seen.alive == 0
    assert world.count(Status.PENDING) == 1


def test_what_steps_gave_reaches_the_trainer_on_the_last_tokens_of_turns(
    buffer: Buffer, server_url: str, seen: Seen
) -> None:
    rules = {
        **LOOP,
        "judge_options": {"turn_rewards": True},
        "agent_options": {**LOOP["agent_options"], "max_turns": 3},  # type: ignore[dict-item]
    }
    world = WorkerWorld(buffer, server_url, rules)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    world.admit(1)
    world.play(scene, answer="9")
    [(_, samples)] = world.results(1)
    for sample in samples:
        rewards = np.concatenate([np.asarray(segment.arrays["token_rewards"]) for segment in sample.segments])
        turns = last_tokens(sample.segments, "turns")
        assert len(turns) == 3
        assert rewards[turns].tolist() == [-0.25] * 3
        assert rewards.sum() == sample.reward == -0.75


def test_an_aborted_conversation_starts_again(world: WorkerWorld, seen: Seen) -> None:
    """Also with partial rollout, where the environment cannot resume."""

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(1)
        await world.until_count(Status.ABORTED, 1)
        assert seen.calls.count("teardown") == 2
        script.gate.set()
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    world.admit(1)
    script = world.play(scene, answer="5", open_gate=False, swap="abort")
    assert all(request.prefix_ids is None for request in script.requests)
    [(_, samples)] = world.results(1)
    assert [(sample.text, sample.reward) for sample in samples] == [("5", 1.0)] * 2
    assert seen.alive == 0

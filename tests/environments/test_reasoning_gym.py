"""The judge of reasoning-gym: what it takes out of a text, and what it makes of graders that fail."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import orjson
import pytest

from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.environments.check import check
from rollq.environments.expansion import Environment
from rollq.environments.kinds import Level
from rollq.environments.reasoning_gym.extraction import extracted
from rollq.environments.reasoning_gym.judge import GENERATORS, GeneratorOptions, Grader
from rollq.environments.reasoning_gym.plain_answers import RUN_TEXTS, is_plain
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Verdict

T = TypeVar("T")
PATIENCE_S = 10.0
"""Far more than a grader takes that works."""
BUSY_S = 4.0
"""How long a grader may take that never ends and keeps a processor busy; still more than one takes that works."""


GENERATORS_OF_ROWS = sorted({*RUN_TEXTS, "boxnet", "chain_sum"})
FIRST_ROWS = """
import sys
import orjson
from rollq.environments.expansion import Environment
for name in sys.argv[1:]:
    print(orjson.dumps(next(Environment(f"reasoning-gym:{name}", {}, "train", 1).open().rows())).decode())
"""


@cache
def first_rows() -> Mapping[str, Mapping[str, Any]]:
    """A row of each generator, from one process, which imports the package for seconds."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FIRST_ROWS, *GENERATORS_OF_ROWS]
    lines = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return dict(zip(GENERATORS_OF_ROWS, map(orjson.loads, lines), strict=True))


def row_of(generator: str) -> Mapping[str, Any]:
    return first_rows()[generator]


def prompt_of(generator: str, **changes: Any) -> Prompt:
    row = {**row_of(generator), **changes}
    return Prompt(row["prompt"], answer=row["answer"], metadata={"env": row["env"]})


class Desk:
    """Judge processes that all tests share, since each imports the package for seconds."""

    def __init__(self, runner: asyncio.Runner, processes: JudgePool) -> None:
        self.processes = processes
        self._runner = runner

    def run(self, scene: Coroutine[Any, Any, T]) -> T:
        """Await what uses the processes."""
        return self._runner.run(scene)

    def judged(
        self,
        generator: str,
        texts: list[str],
        prompt: Prompt | None = None,
        *,
        timeout_s: float = PATIENCE_S,
        **options: Any,
    ) -> list[Verdict]:
        """The verdicts on texts about one prompt."""
        settings = Environment(f"reasoning-gym:{generator}", options, "train", 1).open().settings()
        judge = make_judge(settings["judge"], settings["judge_options"], JudgeContext(timeout_s, self.processes))
        samples = [Sample((), SampleStatus.COMPLETED, FinishReason.STOP, text=text) for text in texts]

        async def judge_all() -> list[Verdict]:
            return [await judge.verdict(prompt or prompt_of(generator), sample) for sample in samples]

        return self.run(judge_all())


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with asyncio.Runner() as runner:
        processes = JudgePool(1)
        yield Desk(runner, processes)
        runner.run(processes.close())


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The answer is 12.", "7", "12"),
        ("so 3 + 4 = 7\n", "7", "7"),
        ("I say <answer>8</answer>, no: <answer> 9 </answer>.", "7", "9"),
        ("no number at all", "7", ""),
        ("First\nYes", "No", "Yes"),
        ("Here:\n1 0\n0 1", "0 0\n0 0", "1 0\n0 1"),
        ("", "No", ""),
    ],
)
def test_a_bare_answer_is_taken_out(text: str, answer: str, expected: str) -> None:
    assert extracted(text, answer) == expected


def test_answers_are_scored(desk: Desk) -> None:
    answer = row_of("chain_sum")["answer"]
    verdicts = desk.judged("chain_sum", [f"It is {answer}", "It is 123456789", ""])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]


CODE = (
    "__import__('os')._exit(0)",
    "open('/tmp/x', 'w')",
    "S('_'+'_'+'i'+'m'+'p'+'o'+'r'+'t'+'_'+'_')",
    "().__class__",
    "\uff45\uff58\uff45\uff43(x)",
    "x if x else x",
)


@pytest.mark.parametrize("generator", ["countdown", "string_insertion"])
def test_no_text_reaches_a_grader_that_would_run_it(desk: Desk, generator: str) -> None:
    empty, own, *code = desk.judged(
        generator, [f"<answer>{text}</answer>" for text in ("", row_of(generator)["answer"], *CODE)]
    )
    assert (own.reward, own.facts["refused_answers"]) == (1.0, 0.0)
    for verdict in code:
        assert (verdict.reward, verdict.error) == (empty.reward, None)
        assert verdict.facts == {"grader_errors": 0.0, "refused_answers": 1.0}


@pytest.mark.parametrize("generator", sorted(RUN_TEXTS))
def test_own_answers_are_plain_and_code_is_not(generator: str) -> None:
    own = row_of(generator)["answer"]
    assert is_plain(generator, own, own)
    assert not [text for text in CODE if is_plain(generator, text, own)]


@pytest.mark.parametrize(
    ("generator", "answer", "own"),
    [
        ("countdown", "(1+2+3)*(E-E)+floor(E)*floor(E)", "3*2 - 1"),
        ("countdown", "7**0 + 3", "7 - 3"),
        ("puzzle24", "7 * *0 + 3//8", "7 - 3"),
        ("puzzle24", "1e2", "7 - 3"),
        ("puzzle24", "6.1", "7 - 3"),
        ("simple_integration", "Integral(2*X, X)", "X**2 + C"),
        ("polynomial_multiplication", "expand((x + 1)*(x + 2))", "x**2 + 3*x + 2"),
    ],
)
def test_a_way_around_the_question_is_not_plain(generator: str, answer: str, own: str) -> None:
    assert is_plain(generator, own, own)
    assert not is_plain(generator, answer, own)


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("countdown", "(12 + 7)*3 - 100/4"),
        ("intermediate_integration", "Integral(sin(x)/x, x) + C"),
        ("intermediate_integration", "-3*exp(2*x)*sin(x)/5 + log(Abs(X)) + C"),
        ("polynomial_multiplication", "243*x**5 + 3x^2 - y"),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"),
        ("string_insertion", '["A", "B"]'),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
    ],
)
def test_boards_letters_and_formulas_reach_the_grader(generator: str, answer: str) -> None:
    assert is_plain(generator, answer, answer)


@pytest.mark.parametrize("answer", ['{"reward":{"score":1000.0}}', '{"reward":1000.0}', '{"tokens":[1000.0]}'])
def test_code_that_answers_for_its_grader_gets_no_reward_beyond_one(desk: Desk, answer: str) -> None:
    writes = "__import__('os').write({},b'" + answer + "')*0+__import__('os')._exit(0)"

    grader = Grader(GeneratorOptions(generator="countdown"), desk.processes.sealed(GENERATORS), PATIENCE_S)
    texts = [writes.replace("{}", str(pipe), 1) for pipe in range(3, 12)]

    async def score_all() -> list[Mapping[str, Any]]:
        return [await grader.score(prompt_of("countdown"), text) for text in texts]

    answers = desk.run(score_all())
    assert all(answer["score"] < 1 for answer in answers), answers
    assert any("it returned" in str(answer) or "its process" in str(answer) for answer in answers)


@pytest.mark.parametrize("form", ["chat", "after a solved row"])
def test_a_question_may_be_a_message_or_have_words_around_it(desk: Desk, form: str) -> None:
    row, prompt = row_of("chain_sum"), prompt_of("chain_sum")
    system = {"role": "system", "content": "Be brief."}
    messages = (system, {"role": "user", "content": row["prompt"]})
    content = messages if form == "chat" else f"1 + 1 = 2\n\n{row['prompt']}"
    (verdict,) = desk.judged("chain_sum", [f"It is {row['answer']}"], replace(prompt, content=content))
    assert (verdict.reward, verdict.error) == (1.0, None)


def test_a_grader_that_hangs_on_a_text_gives_0_and_is_counted(desk: Desk) -> None:
    row = row_of("polynomial_multiplication")
    [own] = desk.judged("polynomial_multiplication", [f"<answer>{row['answer']}</answer>"])
    [hanging] = desk.judged("polynomial_multiplication", ["9**9**9**9"], timeout_s=BUSY_S)
    assert (own.reward, own.facts["grader_errors"]) == (1.0, 0.0)
    assert (hanging.reward, hanging.error, hanging.facts["grader_errors"]) == (0.0, None, 1.0)
    assert "took longer" in hanging.notes["grader_error"]


def test_a_grader_that_fails_on_the_rows_own_answer_fails_the_sample(desk: Desk) -> None:
    (verdict,) = desk.judged("boxnet", ["1e999"], trust_graders=True)
    assert verdict.reward is None
    assert "scores the row's reference answer 0" in str(verdict.error)


def test_a_row_that_its_seed_does_not_make_fails_the_sample(desk: Desk) -> None:
    other = prompt_of("chain_sum", prompt="How much is 1 + 1?", answer="2")
    (verdict,) = desk.judged("chain_sum", ["2"], other)
    assert "the environment opened with" in str(verdict.error)
    assert "its row has 'How much is 1 + 1?'" in str(verdict.error)


def test_a_row_without_a_seed_fails_the_sample(desk: Desk) -> None:
    (verdict,) = desk.judged("chain_sum", ["2"], Prompt("1 + 1", answer="2"))
    assert "the row has no env.seed" in str(verdict.error)


FINDINGS = {
    "chain_sum": (),
    "complex_arithmetic": ("error: rubbish scores 1 for all questions: 'nan'",),
    "game_of_life_halting": ("error: rubbish scores 1 for all questions: ",),
    "rush_hour": ("error: the reference answers of 20 of 20 rows do not score 1",),
    "prime_factorization": ("warning: the grader raises on 'nan'",),
    "string_insertion": ("warning: the grader hangs on '9**9**9**9'", "warning: the grader runs an answer as code"),
    "ransom_note": ("warning: rows depend on the hash seed",),
}
"""Generator -> all that its check finds, but for notes."""


SAME_FINDING = {"game_of_life_halting", "prime_factorization"}
"""Generators that others show as well: `complex_arithmetic` pays for rubbish, `string_insertion` upsets its grader."""


@pytest.mark.long
@pytest.mark.parametrize(
    "generator",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SAME_FINDING else []) for name in FINDINGS],
)
def test_a_check_finds_what_is_wrong_and_nothing_else(generator: str) -> None:
    found = check(Environment(f"reasoning-gym:{generator}", {}, "train", 20), 20)
    texts = [f"{each.level}: {each.text}" for each in found if each.level is not Level.NOTE]
    assert len(texts) == len(FINDINGS[generator]), texts
    for text, begin in zip(sorted(texts), sorted(FINDINGS[generator]), strict=True):
        assert text.startswith(begin)

"""Checks, without a model, which texts a grader rewards, which texts make it fail, and whether it runs texts."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.common.mappings import without
from rollq.buffer.values.failures import SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.environments.kinds import Finding, Level
from rollq.environments.reasoning_gym import calls
from rollq.environments.reasoning_gym.judge import GENERATORS, GRADER_ERRORS, GeneratorOptions, Grader
from rollq.environments.rubbish import RUBBISH, canaries
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import SCORE, InvalidReward

CALL_S: Final = 3.0
"""A grader that takes longer counts as hanging."""
PROCESSES: Final = 2
SHOWN: Final = 5
RUBBISH_ROWS: Final = 3
"""How many rows with different answers are graded with rubbish."""


def check(name: str, options: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the faults; `options` is JSON."""
    yield from asyncio.run(_check(GeneratorOptions(generator=name, options=exact_json.loads(options)), rows))


async def _check(settings: GeneratorOptions, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    processes = JudgePool(PROCESSES)
    try:
        return await faults_of_grader(settings, rows, processes)
    finally:
        await processes.close()


async def faults_of_grader(
    settings: GeneratorOptions, rows: Sequence[Mapping[str, Any]], processes: JudgePool
) -> list[Finding]:
    """One grader's faults with these rows. If the grader runs text as code, rollq's own texts run in `processes`, and
    other texts run sealed."""
    grader = Grader(settings, processes.sealed(GENERATORS), CALL_S)
    own = await _own_answers(grader, rows)
    rubbish = await _rubbish(grader, _different(rows))
    return [*own, *rubbish, *await _code(settings, processes, rows[0])]


def _different(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first rows with different answers: no rubbish is correct for all of them."""
    first = {str(row["answer"]): row for row in reversed(rows)}
    return [row for row in rows if first[str(row["answer"])] is row][:RUBBISH_ROWS]


async def _own_answers(grader: Grader, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The rows whose reference answers score less than 1."""
    verdicts = await asyncio.gather(*(_score(grader, row, str(row["answer"])) for row in rows))
    low = [(index, verdict) for index, verdict in enumerate(verdicts) if verdict != 1.0]
    if not low:
        return []
    index, verdict = low[0]
    worth = verdict if isinstance(verdict, str) else f"{verdict:g}"
    text = f"the reference answers of {len(low)} of {len(rows)} rows do not score 1: {worth}"
    return [Finding(Level.ERROR, text, index)]


async def _rubbish(grader: Grader, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Texts that the grader scores 1 in all rows, texts on which it raises, and texts on which it hangs."""
    verdicts = {text: await asyncio.gather(*(_score(grader, row, text) for row in rows)) for text in RUBBISH}
    paid = [text for text, of_text in verdicts.items() if set(of_text) <= {1.0}]
    upset = {text: reason for text, of_text in verdicts.items() for reason in _reasons(of_text)[:1]}
    return list(_faults(paid, upset))


def _faults(paid: list[str], upset: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about texts that score 1, and about texts without a score, with the reasons."""
    hanging = [text for text, reason in upset.items() if "took longer" in reason]
    raising = without(upset, hanging)
    if paid:
        yield Finding(Level.ERROR, f"rubbish scores 1 for all questions: {_listed(paid)}", 0)
    if hanging:
        yield Finding(Level.WARNING, f"the grader hangs on {_listed(hanging)}, which scores 0", 0)
    if raising:
        first = next(iter(raising.values()))
        yield Finding(Level.WARNING, f"the grader raises on {_listed(list(raising))}: {first}", 0)


def _reasons(verdicts: Sequence[float | str]) -> list[str]:
    return [verdict for verdict in verdicts if isinstance(verdict, str)]


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - SHOWN} other answers" if len(texts) > SHOWN else ""
    return ", ".join(f"{text[:30]!r}" for text in texts[:SHOWN]) + more


async def _score(grader: Grader, row: Mapping[str, Any], answer: str) -> float | str:
    """The score of a bare answer, or why there is none."""
    prompt = Prompt(row["prompt"], answer=row["answer"], metadata={"env": row["env"]})
    try:
        verdict = await grader.score(prompt, answer)
    except SampleFailed as error:
        return str(error)
    return str(verdict["grader_error"]) if verdict.get(GRADER_ERRORS) else float(verdict[SCORE])


async def _code(settings: GeneratorOptions, processes: JudgePool, row: Mapping[str, Any]) -> list[Finding]:
    """Whether the grader runs an answer as code: without a seal, such texts would create a file."""
    options = exact_json.dumps(dict(sorted(settings.options.items()))).decode()
    with tempfile.TemporaryDirectory(prefix="rollq-canary-") as folder:
        file = Path(folder) / "canary"
        for text in canaries(file):
            place = (settings.generator, options, row["env"]["seed"])
            before = (calls.prepare, (*place, row["prompt"]))
            with suppress(JudgeFailed, InvalidReward, TimeoutError):
                await processes.call(calls.grade, *place, text, timeout_s=CALL_S, before=before)
            if file.exists():
                said = "the grader runs an answer as code: rollq seals it, or needs trust_graders = true"
                return [Finding(Level.WARNING, said, 0)]
    return []

"""`rollq try`: shows rendered prompts, judged texts, and samples for a few rows, without a server."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.common.counting import count
from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.cli.options import file_and

if TYPE_CHECKING:
    from rollq.cli.settings.model import RollqSettings
    from rollq.cli.settings.task_settings import JudgedPrompts
    from rollq.producer.prompts import PromptFile
    from rollq.workers.gateway.open_sessions import Gateway
    from rollq.workers.groups.task_settings import WorkerTask
    from rollq.workers.judging.rewards import Verdict
    from rollq.workers.settings import WorkerSettings
    from rollq.workers.trying import JudgedText, TriedRow

ROWS = 4
MOST_TEXT = 2000
"""How many characters of a prompt are shown."""
MOST_ANSWER = 200
"""How many characters of an answer or a sample are shown."""


@click.command("try")
@file_and(task="[TASK]", needs_file=True)
@click.option("--rows", type=click.IntRange(1), help=f"Number of rows to try; default {ROWS}.")
@click.option(
    "--answers",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Judge the lines of this file, one for each row: plain text, or JSON strings in a .jsonl file.",
)
@click.option("--sample", is_flag=True, help="Also sample a group of each row with the engine of [worker].")
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Sample with the model in a folder."
)
def try_rows(
    file: Path, task: str | None, rows: int | None, answers: Path | None, sample: bool, model: Path | None
) -> None:
    """Try a few rows of a task or an evaluation: show their prompts as the model sees them, and what the judge says.

    TASK may be left out if there is only one.

    The judge gets each row's reference answer, in the forms that judges often expect, or the lines of --answers. With
    --sample or --model, it also gets samples. No server is needed. The exit status is 1 if something is wrong.

    \b
    Example:
      rollq try rollq.toml sums
      rollq try rollq.toml sums --answers answers.txt
      rollq try rollq.toml sums --model Qwen2.5-0.5B-Instruct --rows 8
    """
    from rollq.cli.settings.environment_rows import write_missing_prompts
    from rollq.cli.settings.file import load_settings
    from rollq.monitor.text.terminal import one_line
    from rollq.monitor.text.units import count
    from rollq.producer.prompts import PromptFile

    settings = load_settings(file)
    task, table = _table(settings, task)
    sys.path.append(str(file.absolute().parent))
    write_missing_prompts(settings, file)
    if answers is not None and table.judge == "none":
        raise ConfigError(f"--answers: samples of task {task!r} are only judged together; use --sample or --model")
    given = None if answers is None else read_answers(answers)
    worker = settings.worker if model is None else _with_model(settings.worker, model)
    reader = settings.row_readers().get(task)
    with ExitStack() as stack:
        prompts = stack.enter_context(PromptFile(table, reader))
        wanted = rows or ROWS if given is None else min(rows or len(given), len(given))
        tried, problems = first_rows(prompts, wanted)
        asyncio.run(try_all(task, _as_task(table), worker, tried, given, sample or model is not None, settings.seed))
    problems += [problem for row in tried for problem in dict.fromkeys(row.problems)]
    problems += group_problems(tried)
    for line in report(tried):
        click.echo(line)
    click.echo("\n" + (f"{count(len(problems), 'problem')}:" if problems else "nothing is wrong"))
    for problem in problems:
        click.echo(f"  {one_line(problem)}")
    if problems:
        raise SystemExit(1)


async def try_all(
    task: str,
    rules: "WorkerTask",
    worker: "WorkerSettings",
    rows: Sequence["TriedRow"],
    given: Sequence[str] | None,
    samples: bool,
    seed: int,
) -> None:
    """Judge the given texts, or each row's reference answer. `samples` adds samples for the rows."""
    from rollq.workers.gateway.open_sessions import Gateway
    from rollq.workers.groups.agent_loops import check_loop
    from rollq.workers.groups.recipes import check_templates, make_recipes
    from rollq.workers.judging.process_pool import JudgePool
    from rollq.workers.run import load_engine, make_tokenizer
    from rollq.workers.trying import Trying

    processes, gateway = JudgePool(worker.judge_processes), Gateway(worker.gateway)
    recipes = make_recipes({task: rules}, worker, seed, processes, gateway)
    recipe = recipes[task]
    if samples and gateway.tasks:
        raise ConfigError(
            f'agent_loop = "{rules.agent_loop}": its samples come from programs that connect to a worker; leave '
            "out --sample"
        )
    tokenizer = make_tokenizer(worker)
    check_templates(recipes, tokenizer)
    if samples:
        check_loop(recipe.loop, tokenizer)
    trying = Trying(task, recipe, tokenizer)
    try:
        for row in rows:
            number = row.prompt.row or 0
            await trying.look(row, None if given is None else given[number])
        if samples:
            engine = load_engine(worker)
            await engine.start()
            try:
                async with served(gateway):
                    await trying.sample(rows, engine, seed)
            finally:
                await engine.close()
    finally:
        await recipe.close()
        await processes.close()


@asynccontextmanager
async def served(gateway: "Gateway") -> AsyncIterator[None]:
    """Listen for agents, if the loop has any."""
    if not gateway.is_wanted:
        yield
        return
    from rollq.workers.gateway.http_server import Server  # needs aiohttp

    server = Server(gateway)
    await server.start()
    try:
        yield
    finally:
        await server.close()


def _table(settings: "RollqSettings", task: str | None) -> "tuple[str, JudgedPrompts]":
    tables: Mapping[str, Any] = {**settings.tasks, **settings.evaluations}
    if task is None:
        if len(tables) > 1:
            raise ConfigError(f"TASK: name one of {', '.join(sorted(tables))}")
        (task,) = tables
    if task not in tables:
        raise ConfigError(f"there is no task or evaluation {task!r}: the file has {', '.join(sorted(tables))}")
    table: JudgedPrompts = tables[task]
    if getattr(table, "offline", False):
        raise ConfigError(f"task {task!r} has offline = true: it has no prompts and no judge")
    return task, table


def _as_task(table: Any) -> "WorkerTask":
    from rollq.cli.settings.task_settings import EvaluationSettings

    rules: WorkerTask = table.as_task() if isinstance(table, EvaluationSettings) else table
    return rules


def _with_model(worker: "WorkerSettings", model: Path) -> "WorkerSettings":
    """The worker's settings with the engine `transformers` and a model."""
    options = worker.options if worker.engine == "transformers" else {}
    return worker.model_copy(
        update={"engine": "transformers", "options": {**options, "model": model}, "tokenizer": None}
    )


def read_answers(path: Path) -> list[str]:
    """The lines of a file: plain text, or JSON strings in a `.jsonl` file.

    Raises `ConfigError` for a file that is not text, and for a line that is not a JSON string.
    """
    import orjson

    try:
        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--answers {str(path)!r} cannot be read: {error}") from error
    if lines == [""]:
        raise ConfigError(f"--answers {str(path)!r} is empty: it needs a line for each row")
    lines = [line.removesuffix("\r") for line in lines]
    if path.suffix != ".jsonl":
        return lines
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            text = orjson.loads(line)
        except orjson.JSONDecodeError:
            text = None
        if not isinstance(text, str):
            raise ConfigError(f"--answers {path}:{number} is not a JSON string: {line!r:.80}")
        texts.append(text)
    return texts


def first_rows(file: "PromptFile", rows: int) -> tuple[list["TriedRow"], list[str]]:
    """The usable rows among the first rows, and why the other rows are unusable."""
    from rollq.workers.trying import TriedRow

    tried: list[TriedRow] = []
    problems: list[str] = []
    for row in range(min(rows, file.rows)):
        try:
            tried.append(TriedRow(file.place(row), file.prompt(row)))
        except InvalidPrompt as error:
            problems.append(str(error))
    return tried, problems


def group_problems(rows: Sequence["TriedRow"]) -> list[str]:
    """The problems with all rows' samples together."""
    sampled = [row for row in rows if row.samples]
    made = [sample for row in sampled for sample in row.samples]
    problems = []
    if sampled and all(row.has_equal_rewards and len(row.samples) > 1 for row in sampled):
        problems.append(
            "every group has equal rewards, so there is nothing to learn: are the prompts too easy, or too hard?"
        )
    truncated = sum(sample.is_truncated for sample in made)
    if 2 * truncated > len(made):
        of = f"{truncated} of {count(len(made), 'sample')}"
        problems.append(f"{of} {'is' if len(made) == 1 else 'are'} truncated: raise max_tokens")
    return problems


def rows_report(rows: Sequence["TriedRow"]) -> Iterator[str]:
    """The lines about each row."""
    for row in rows:
        yield from _row_lines(row)


def report(rows: Sequence["TriedRow"]) -> Iterator[str]:
    """The lines that show what was tried."""
    yield from rows_report(rows)
    yield from samples_report(rows)


def samples_report(rows: Sequence["TriedRow"]) -> Iterator[str]:
    """The lines about all rows' samples together."""
    if made := [sample for row in rows for sample in row.samples]:
        yield from _sample_lines(rows, made)


def _row_lines(row: "TriedRow") -> Iterator[str]:
    from rollq.monitor.text.terminal import escaped

    yield f"\n{row.place}: {row.prompt_tokens} tokens"
    for line in escaped(_cut(row.shown, MOST_TEXT)).split("\n"):
        yield f"  | {line}"
    if row.own is not None:
        against = "" if row.own.wrong is None else f"; a wrong text: {_reward(row.own.wrong)}"
        yield f"  own answer {_text(row.own.text)}: {_reward(row.own.verdict)}{against}"
    elif row.given is not None:
        yield f"  answer {_text(row.given.text)}: {_reward(row.given.verdict)}, {_seconds(row.given.judge_s)}"
    for number, sample in enumerate(row.samples, start=1):
        cut = ", truncated" if sample.is_truncated else ""
        yield f"  sample {number}: {_reward(sample.verdict)}, {sample.tokens} tokens{cut}: {_text(sample.text)}"


def _sample_lines(rows: Sequence["TriedRow"], made: Sequence["JudgedText"]) -> Iterator[str]:
    groups = [row for row in rows if row.samples]
    rewards = [sample.verdict.reward for sample in made if sample.verdict.reward is not None]
    lengths = [sample.tokens for sample in made]
    equal = sum(row.has_equal_rewards for row in groups)
    yield f"\n{count(len(made), 'sample')} of {count(len(groups), 'row')}"
    yield f"  reward: {mean(rewards):.3f} on average" if rewards else "  reward: none"
    yield f"  groups with equal rewards, which teach nothing: {equal} of {len(groups)}"
    yield f"  length: {mean(lengths):.0f} tokens on average, at most {max(lengths)}"
    yield f"  truncated: {sum(sample.is_truncated for sample in made)} of {len(made)}"
    yield f"  judge: {_seconds(mean(sample.judge_s for sample in made))} for each sample"


def _reward(verdict: "Verdict") -> str:
    from rollq.monitor.text.terminal import one_line
    from rollq.workers.trying import facts_of

    if verdict.error:
        return f"no reward, {one_line(verdict.error)}"
    facts = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value!r:.40}"
                      for name, value in facts_of(verdict).items())  # fmt: skip
    return f"reward {verdict.reward:g}" + (f" ({one_line(facts)})" if facts else "")


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _text(text: str) -> str:
    return repr(_cut(text, MOST_ANSWER))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."

"""`rollq import`: puts finished samples from a file into an offline task."""

import hashlib
import threading
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.common.counting import count
from rollq.buffer.errors import ConfigError
from rollq.cli.options import file_and
from rollq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.cli.imports.finished_rows import FinishedRows
    from rollq.cli.settings.model import RollqSettings
    from rollq.cli.settings.task_settings import TaskSettings

GROUPS_PER_INSERTION = 64
SOURCE_DIGITS = 16
"""How many hexadecimal digits of a file's SHA-256 name the file as a source."""
QUIET_S = 1.0
"""Seconds after which a progress bar appears."""


@click.command("import")
@file_and(task="TASK", data="SAMPLES", needs_file=True)
@click.option("--reward", type=float, help="Reward for samples that have none; without it, they are an error.")
@click.option(
    "--without-logprobs",
    is_flag=True,
    help="Import samples without logprobs for a trainer that needs none, if the settings have no table [trainer]. "
    "`rollq train` leaves them out of a loss that needs logprobs.",
)
@click.option("--dry-run", is_flag=True, help="Only check the file; no server is needed.")
def import_(file: Path, task: str, data: str, reward: float | None, without_logprobs: bool, dry_run: bool) -> None:
    """Put the finished samples of a file into TASK, which has offline = true, as completed groups.

    SAMPLES is JSON Lines, a list in a .json file, .parquet, or what `rollq export` wrote. A row is a group, with a
    prompt and group_size responses with their rewards, or a conversation. The whole file is checked first, including
    for logprobs that the loss in [trainer] needs. If this command is interrupted, repeat it: it continues, and inserts
    nothing twice.

    \b
    Example:
      rollq import rollq.toml demonstrations expert.jsonl --dry-run
      rollq import rollq.toml demonstrations expert.jsonl --reward 1
    """
    from rollq.cli.imports.finished_rows import FinishedRows
    from rollq.cli.run_location import fingerprints, open_run
    from rollq.cli.settings.file import load_settings
    from rollq.workers.run import make_tokenizer

    settings = load_settings(file)
    rules = _offline_task(settings, task, file)
    folder = _tokenizer_folder(settings)
    tokenizer = make_tokenizer(settings.worker.model_copy(update={"tokenizer": folder}))
    rows = FinishedRows(Path(data), rules, tokenizer, reward, _vocabulary(settings))
    stop = stop_on_signals()
    total, bare = _check(rows, stop)
    if bare:
        _check_logprobs(settings, task, f"{bare} of {total} groups have no logprobs", without_logprobs)
    if total is None or dry_run:
        click.echo(
            "stopped; nothing was imported" if total is None else f"{count(total, 'group')} of {data} can be imported"
        )
        return
    with open_run(settings, stop, **fingerprints(None, folder, "the tokenizer")) as buffer:
        _insert(buffer, task, rows, total, stop)


def _offline_task(settings: "RollqSettings", name: str, path: Path) -> "TaskSettings":
    task = settings.tasks.get(name)
    if task is None:
        raise ConfigError(f"task {name!r}: {path} has {', '.join(settings.tasks)}")
    if not task.offline:
        raise ConfigError(
            f"task {name!r} is sampled by workers: finished samples need a task with offline = true in {path}"
        )
    return task


def _tokenizer_folder(settings: "RollqSettings") -> Path | None:
    """The tokenizer that workers use, or the trainer's if the settings name no model for workers."""
    folder: Path | None = settings.worker.tokenizer or settings.worker.options.get("model")
    return settings.trainer.model if folder is None and settings.trainer else folder


def _vocabulary(settings: "RollqSettings") -> int | None:
    """The vocabulary size of the trainer's model, or else of the workers'; None without a model."""
    from rollq.workers.tokenizers.hugging_face import model_vocabulary

    served = settings.worker.options.get("model")
    folder = settings.trainer.model if settings.trainer else served and Path(served)
    return model_vocabulary(folder) if folder else None


def _check(rows: "FinishedRows", stop: threading.Event) -> tuple[int | None, int]:
    """Check the whole file. Returns how many groups it has (None if stopped), and how many groups lack logprobs."""
    import numpy as np
    from tqdm import tqdm

    total = bare = 0
    with tqdm(desc="check", unit=" groups", delay=QUIET_S) as bar:
        for group in rows.check():
            total += 1
            bare += any(np.isnan(part.logprobs).any() for sample in group.samples for part in sample.segments)
            bar.update()
            if stop.is_set():
                return None, 0
    if not total:
        raise ConfigError(f"file {str(rows.path)!r} has no rows")
    return total, bare


def _check_logprobs(settings: "RollqSettings", task: str, problem: str, without_logprobs: bool) -> None:
    """Raise `ConfigError` unless the trainer is known to need no logprobs. `problem` says how many groups lack
    logprobs."""
    if settings.trainer is None:
        if not without_logprobs:
            raise ConfigError(
                f"{problem}, and the settings have no table [trainer] to say whether the loss needs them: if your "
                "trainer does not, repeat the command with --without-logprobs"
            )
        return
    loss = settings.trainer.loss
    if loss.absent_logprobs == "refuse" and task not in loss.need_no_logprobs:
        raise ConfigError(
            f'{problem}, and the loss in [trainer] needs them: set absent_logprobs = "current" in [trainer.loss] for '
            "ratios of 1, or name the task in sft to imitate it, and restart a running trainer"
        )


def _insert(buffer: "Buffer", task: str, rows: "FinishedRows", total: int, stop: threading.Event) -> None:
    from tqdm import tqdm

    source = source_of(rows.path)
    done = before = buffer.inserted(task, source)
    if before == total:
        click.echo(f"already imported: task {task} has the {count(total, 'group')} of {rows.path} ({source})")
        return
    waiting = islice((group for _, group in rows.groups()), done, None)
    with tqdm(desc="import", unit=" groups", total=total, initial=done, delay=QUIET_S) as bar:
        while not stop.is_set() and (groups := list(islice(waiting, GROUPS_PER_INSERTION))):
            buffer.insert(task, groups, source=source, after=done)
            done += len(groups)
            bar.update(len(groups))
    if done < total:
        click.echo(f"stopped after {done} of {count(total, 'group')}; the same command continues")
        return
    earlier = f", {before} of them earlier" if before else ""
    click.echo(f"imported {count(total, 'group')} of {rows.path} into task {task}{earlier} ({source})")


def source_of(path: Path) -> str:
    """A file's name as a source, which depends only on the content."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:SOURCE_DIGITS]}"

"""The folder of a demo: where everything lies, and which prompts it uses.

Nothing of a demo is written outside its folder; `environment` keeps the caches and temporary files of libraries in it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.cli.demo.prompts import prompt_files
from rollq.monitor.records import DEPTH_FILE, METRICS_FILE
from rollq.producer.columns import Columns
from rollq.producer.jsonl import json_object

HELD_OUT_ROWS = 64
TRIED_ROWS = 100


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One task of a demo: its files (JSONL, held-out rows disjoint from training), their fields, and its judge."""

    name: str
    prompts: Path
    held_out: Path
    judge: str
    max_tokens: int
    batch_groups: int
    prompt_field: str = "prompt"
    answer_field: str = "answer"


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """Paths inside a demo's folder."""

    root: Path

    def create(self) -> None:
        """Make the folder. Raises `ConfigError` when it holds anything."""
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ConfigError(f"folder {str(self.root)!r} is not empty; name a new one with --out")
        for folder in (self.root, self.caches, self.prompts, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def trainer(self) -> Path:
        return self.root / "trainer"

    @property
    def trained_model(self) -> Path:
        """The newest checkpoint; the initial model before there is one."""
        from rollq.consumer.checkpoints import newest_checkpoint  # needs torch

        checkpoint = newest_checkpoint(self.trainer)
        return self.model if checkpoint is None else checkpoint.folder

    @property
    def metrics(self) -> Path:
        """The trainer's line per step."""
        return self.trainer / METRICS_FILE

    @property
    def depths(self) -> Path:
        """A look at the buffer per second."""
        return self.root / DEPTH_FILE

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def config(self) -> Path:
        return self.root / "rollq.toml"

    @property
    def caches(self) -> Path:
        return self.root / "caches"

    def environment(self) -> dict[str, str]:
        """Variables for every process of the demo: one thread each, no network, caches and scratch inside."""
        caches = str(self.caches)
        return {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": caches,
            "MPLCONFIGDIR": caches,
            "TMPDIR": caches,
            "XDG_CACHE_HOME": caches,
        }


def own_tasks(folder: DemoFolder) -> list[DemoTask]:
    """The tasks that ship with rollq, their prompts written into the folder."""
    for name, content in prompt_files().items():
        (folder.prompts / name).write_bytes(content)
    return [
        DemoTask(
            name=name,
            prompts=folder.prompts / f"{name}.jsonl",
            held_out=folder.prompts / f"{name}_heldout.jsonl",
            judge="exact_match",
            max_tokens=8,
            batch_groups=16,
        )
        for name in ("sum", "sort")
    ]


def read_rows(prompts: Path, prompt_field: str, answer_field: str) -> list[bytes]:
    """The lines of a user's prompt file, as they are: what is wrong with some of them is the producer's to say.

    Raises `ConfigError` for a file that cannot be read or has less than two rows, `InvalidPrompt` when none of the
    first rows is a prompt.
    """
    try:
        lines = prompts.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"prompts file {str(prompts)!r} cannot be read: {error.strerror}") from error
    rows = [line for line in lines if line.strip()]
    if len(rows) < 2:
        raise ConfigError(f"prompts file {str(prompts)!r} has {len(rows)} rows; at least 2 are needed, JSON objects")
    columns = Columns(prompt_field=prompt_field, answer_field=answer_field)
    problem = None
    for line in rows[:TRIED_ROWS]:
        try:
            columns.prompt(json_object(line))
        except ValueError as error:
            problem = problem or error
        else:
            return rows
    raise InvalidPrompt(f"none of the first rows of {str(prompts)!r} is a prompt: {problem}")


def user_task(folder: DemoFolder, rows: Sequence[bytes], prompt_field: str, answer_field: str, seed: int) -> DemoTask:
    """The task of a user's rows, up to `HELD_OUT_ROWS` of which, drawn at random, are held out."""
    held_out = set(random.Random(seed).sample(range(len(rows)), min(HELD_OUT_ROWS, len(rows) // 2)))
    task = DemoTask(
        name="prompts",
        prompts=folder.prompts / "train.jsonl",
        held_out=folder.prompts / "heldout.jsonl",
        judge="last_number",
        max_tokens=16,
        batch_groups=8,
        prompt_field=prompt_field,
        answer_field=answer_field,
    )
    for path, wanted in ((task.prompts, False), (task.held_out, True)):
        path.write_bytes(b"".join(line + b"\n" for row, line in enumerate(rows) if (row in held_out) is wanted))
    return task

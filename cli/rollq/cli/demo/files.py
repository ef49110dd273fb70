"""A demo's folder and prompts.

A demo writes nothing outside its folder; `environment` keeps libraries' caches and temporary files inside it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.cli.demo.models import SMOLLM2, TINY, DemoModel
from rollq.cli.demo.prompts import digit_sum_files, prompt_files
from rollq.monitor.report.records import DEPTH_FILE, METRICS_FILE
from rollq.producer.columns import Columns
from rollq.producer.jsonl import json_object

HELD_OUT_ROWS = 64
TRIED_ROWS = 100


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One task of a demo: its JSONL files (held-out rows have a separate file), their fields, and its judge."""

    name: str
    prompts: Path
    held_out: Path
    judge: str
    max_tokens: int
    batch_groups: int
    stop: tuple[str, ...] = ()
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    temperature: float = 1.0
    chat: bool = False


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """Paths inside a demo's folder."""

    root: Path

    def create(self) -> None:
        """Create the folder. Raises `ConfigError` when it exists and is not empty, or cannot be written."""
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ConfigError(f"folder {str(self.root)!r} is not empty; name a new one with --out")
        with writing_to("--out", self.root):
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
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def trainer(self) -> Path:
        return self.root / "trainer"

    @property
    def trained_model(self) -> Path:
        """The newest checkpoint, or the initial model before there is one."""
        from rollq.consumer.trainer.checkpoints import newest_checkpoint  # needs torch

        checkpoint = newest_checkpoint(self.trainer)
        return self.model if checkpoint is None else checkpoint.folder

    @property
    def metrics(self) -> Path:
        """The trainer's metrics, one line per step."""
        return self.trainer / METRICS_FILE

    @property
    def depths(self) -> Path:
        """Readings of the buffer, one per second."""
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

    def inside(self, path: Path) -> str:
        """`path` relative to the folder."""
        return str(path.relative_to(self.root))

    def environment(self) -> dict[str, str]:
        """Variables for the demo's processes: one thread, no network, and caches and temporary files in the folder."""
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


def own_tasks(folder: DemoFolder, model: DemoModel = TINY) -> list[DemoTask]:
    """Write the prompts of the model's tasks, which ship with rollq, into the folder, and return the tasks."""
    real = model is SMOLLM2
    for name, content in (digit_sum_files() if real else prompt_files()).items():
        (folder.prompts / name).write_bytes(content)
    return [
        DemoTask(
            name=name,
            prompts=folder.prompts / f"{name}.jsonl",
            held_out=folder.prompts / f"{name}_heldout.jsonl",
            judge="last_number" if real else "exact_match",
            max_tokens=8,
            batch_groups=model.own_batch_groups,
            stop=("\n",) if real else (),
            temperature=model.temperature,
        )
        for name in (("digits",) if real else ("sum", "sort"))
    ]


def read_rows(prompts: Path, prompt_field: str, answer_field: str) -> list[bytes]:
    """The lines of a user's prompt file, unchanged; the producer will report lines that are not prompts. Raises
    `ConfigError` for a file that cannot be read or has fewer than two rows, and `InvalidPrompt` if none of the first
    rows is a prompt.
    """
    try:
        lines = prompts.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"prompts file {str(prompts)!r} cannot be read: {error.strerror}") from error
    rows = [line for line in lines if line.strip()]
    if len(rows) < 2:
        raise ConfigError(f"prompts file {str(prompts)!r} has {len(rows)} rows; at least 2 JSON objects are needed")
    columns = Columns(prompt_field=prompt_field, answer_field=answer_field)
    problems = [_problem(columns, line) for line in rows[:TRIED_ROWS]]
    if all(problems):
        raise InvalidPrompt(f"none of the first rows of {str(prompts)!r} is a prompt: {problems[0]}")
    return rows


def _problem(columns: Columns, line: bytes) -> str | None:
    """Return why a line is not a prompt, or None for a prompt."""
    try:
        columns.prompt(json_object(line))
    except ValueError as error:
        return str(error) or type(error).__name__
    return None


def user_task(
    folder: DemoFolder, rows: Sequence[bytes], prompt_field: str, answer_field: str, seed: int, model: DemoModel = TINY
) -> DemoTask:
    """Write a user's rows into the folder, with up to `HELD_OUT_ROWS` random rows held out, and return their task."""
    held_out = set(random.Random(seed).sample(range(len(rows)), min(HELD_OUT_ROWS, len(rows) // 2)))
    task = DemoTask(
        name="prompts",
        prompts=folder.prompts / "train.jsonl",
        held_out=folder.prompts / "heldout.jsonl",
        judge="last_number",
        max_tokens=16,
        batch_groups=model.user_batch_groups,
        prompt_field=prompt_field,
        answer_field=answer_field,
        temperature=model.temperature,
        chat=model.chat,
    )
    for path, wanted in ((task.prompts, False), (task.held_out, True)):
        path.write_bytes(b"".join(line + b"\n" for row, line in enumerate(rows) if (row in held_out) is wanted))
    return task

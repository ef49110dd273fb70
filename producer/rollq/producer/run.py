"""Runs a producer from the settings of its tasks: opens prompt files, and loads orders and hooks."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from rq import Queue

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import SHOULD_CONTINUE, check_function, inside
from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import ProducerBuffer
from rollq.buffer.rules.shards import shard_of
from rollq.producer.producer import EvaluationFeed, Producer, ShouldContinue, TaskFeed
from rollq.producer.prompt_order import PromptOrder, make_order
from rollq.producer.prompt_records import check_prompts
from rollq.producer.prompts import PromptFile, ReadRow
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ProducerSettings, ProducerTask, PromptSettings
from rollq.producer.usable_rows import UsableRows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The opened prompts of one task, with its order and its hook."""

    name: str
    task: ProducerTask
    file: PromptFile
    order: PromptOrder
    should_continue: ShouldContinue | None

    def feed(self, buffer: ProducerBuffer, seed: int) -> TaskFeed:
        """This task's feed for a `Producer`; its order uses the buffer's prompt statistics."""
        stats_of = partial(buffer.prompt_stats, self.name)
        _, number, shards = shard_of(self.name)
        sampler = Sampler(
            self.file,
            (seed,),
            self.task.max_bad_rows,
            self.order,
            stats_of,
            number=number,
            shards=shards,
            passes=self.task.passes,
        )
        return TaskFeed(
            self.name,
            sampler,
            self.task.max_prompt_tokens,
            self.task.min_keep_rate,
            self.should_continue,
            self.task.stop_after_failures,
        )


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The opened prompts of a run's tasks and evaluations; `files` holds the prompt file of each."""

    tasks: tuple[TaskPrompts, ...]
    evaluations: tuple[EvaluationFeed, ...]
    files: Mapping[str, PromptFile]


@contextmanager
def open_prompts(
    tasks: Mapping[str, ProducerTask],
    evaluations: Mapping[str, PromptSettings],
    read_rows: Mapping[str, ReadRow] = MappingProxyType({}),
) -> Iterator[RunPrompts]:
    """Open all prompt files and load all plugins, to find mistakes before a run is created.

    Shards of a task share its file. `read_rows` maps a task or an evaluation to a function that raises `ValueError` for
    prompts that its judge cannot use. Raises `ConfigError` for a file that cannot be read, lacks columns in the
    settings or has fewer prompts than shards, and for an order or a hook that cannot be loaded.
    """
    opened: dict[str, PromptFile] = {}
    with ExitStack() as files:

        def open_file(kind: str, name: str, settings: PromptSettings) -> PromptFile:
            task, _, shards = shard_of(name)
            if task not in opened:
                with inside(f"{kind}s.{task}"):
                    file = opened[task] = files.enter_context(PromptFile(settings, read_rows.get(task)))
                log.info("%s %s: %d prompts in %s", kind, task, file.rows, settings.prompts)
                if file.rows < shards:
                    raise ConfigError(
                        f"tasks.{task}.batches.shards = {shards}: there are {file.rows} prompts; use fewer shards"
                    )
            return opened[task]

        def prompts_of(name: str, task: ProducerTask) -> TaskPrompts:
            file = open_file("task", name, task)
            with inside(f"tasks.{shard_of(name).task}"):
                return TaskPrompts(name, task, file, make_order(task, file.numbers), _load_hook(task))

        yield RunPrompts(
            tuple(prompts_of(name, task) for name, task in tasks.items()),
            tuple(
                EvaluationFeed(name, UsableRows(open_file("evaluation", name, settings), settings.max_bad_rows))
                for name, settings in evaluations.items()
            ),
            {name: opened[shard_of(name).task] for name in (*tasks, *evaluations)},
        )


def _load_hook(task: ProducerTask) -> ShouldContinue | None:
    path = task.should_continue
    if path is None:
        return None
    hook: ShouldContinue = load_plugin("should_continue", path, {})
    check_function(hook, SHOULD_CONTINUE, path)
    return hook


def check_all_prompts(buffer: ProducerBuffer, prompts: RunPrompts, seed: int) -> None:
    """Compare the prompts of registered tasks with the recorded prompts, as `check_prompts` does for one task."""
    for name in buffer.tasks():
        if name in prompts.files:
            check_prompts(buffer, name, prompts.files[name], seed)


def run_producer(
    buffer: ProducerBuffer,
    queue: Queue,
    prompts: RunPrompts,
    settings: ProducerSettings,
    *,
    seed: int = 0,
    stop: threading.Event,
) -> None:
    """Produce for the buffer's run, whose tasks must be registered, until `stop` is set.

    Raises `RunMismatch` for prompts that differ from the run's, and the errors of `Producer.run`.

    The caller closes `buffer` and `queue`.
    """
    check_all_prompts(buffer, prompts, seed)
    feeds = [task.feed(buffer, seed) for task in prompts.tasks]
    Producer(buffer, queue, settings, feeds, prompts.evaluations).run(stop)

"""Options of a demo, and the `rollq.toml` that follows from them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollq.cli.demo.files import DemoFolder, DemoTask
from rollq.cli.demo.models import DemoModel
from rollq.cli.settings.task_settings import EvaluationSettings

RUN = "demo"
GROUP_SIZE = 8
WARM_UP_STEPS = 600
"""Supervised steps after which the tiny model can learn."""

TASK = """
[tasks.{name}]
prompts = {prompts}
rows.prompt_field = {prompt_field}
rows.answer_field = {answer_field}
judge = {judge}
max_tokens = {max_tokens}
sampling.stop = {stop}
temperature = {temperature}
rows.chat = {chat}
batch_groups = {batch_groups}
group_size = {group_size}
max_staleness = {max_staleness}
staleness.partial_rollout = {partial_rollout}
limits.lease_s = {lease_s}                  # the groups of a killed worker are taken over this soon
"""

ARCHIVE = """
[archive]
url = {url}
"""

FILE = """\
# Written by `rollq demo`. Paths start at this folder, so it can be moved. See examples/rollq.toml for all settings.
run = {run}
seed = {seed}

[redis]
buffer_url = {url}
{archive}{tasks}
[producer]
strategy = {strategy}

[worker]
grace_s = 1.0
swap = {swap}

[worker.options]
model = {model}
device = {device}

[trainer]
model = {model}
output = {output}
steps = {steps}
learning_rate = {learning_rate}
transport = {transport}
device = {device}
checkpoint_every = {checkpoint_every}
layout = "padded"              # answers are short and of similar length
threads = 1
"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `rollq demo`. `minutes`, if set, determines `steps`; `max_staleness` is in weight syncs."""

    out: Path
    model: DemoModel
    steps: int
    minutes: float | None
    seed: int
    prompts: Path | None
    prompt_field: str
    answer_field: str
    max_staleness: int
    strategy: str
    partial_rollout: bool
    warm_up_steps: int
    workers: int
    live: bool

    @property
    def should_learn(self) -> bool:
        """Whether the model must answer better at the end, as with the demo's prompts and rewards and enough steps."""
        as_made = self.prompts is None and self.warm_up_steps >= WARM_UP_STEPS
        return as_made and self.steps >= self.model.least_steps

    @property
    def device(self) -> str:
        """Torch device of trainer and workers. Needs torch, unless the model never uses a GPU."""
        if not self.model.uses_gpu:
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


def demo_toml(
    options: DemoOptions, folder: DemoFolder, tasks: Sequence[DemoTask], url: str, *, archived: bool = False
) -> str:
    """The demo's `rollq.toml`; `url` is its server's URL. With `archived`, an archiver keeps trained groups in the
    folder."""
    return FILE.format(
        run=_toml(RUN),
        seed=options.seed,
        url=_toml(url),
        archive=ARCHIVE.format(url=_toml(folder.inside(folder.archive))) if archived else "",
        tasks="".join(_task_toml(options, folder, task) for task in tasks),
        strategy=_toml(options.strategy),
        swap=_toml("abort" if options.partial_rollout else "keep"),
        model=_toml(folder.inside(folder.model)),
        output=_toml(folder.inside(folder.trainer)),
        device=_toml(options.device),
        steps=options.steps,
        learning_rate=options.model.learning_rate,
        transport=_toml(options.model.transport),
        checkpoint_every=options.model.checkpoint_every,
    )


def _task_toml(options: DemoOptions, folder: DemoFolder, task: DemoTask) -> str:
    return TASK.format(
        name=task.name,
        prompts=_toml(folder.inside(task.prompts)),
        prompt_field=_toml(task.prompt_field),
        answer_field=_toml(task.answer_field),
        judge=_toml(task.judge),
        max_tokens=task.max_tokens,
        stop=_toml(task.stop),
        temperature=task.temperature,
        chat=_toml(task.chat),
        batch_groups=task.batch_groups,
        group_size=GROUP_SIZE,
        max_staleness=options.max_staleness,
        partial_rollout=_toml(options.partial_rollout),
        lease_s=options.model.lease_s,
        seed=options.seed,
    )


def _toml(value: Any) -> str:
    """A string, a boolean or a list of strings in TOML, whose form is the same as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def held_out_settings(task: DemoTask) -> EvaluationSettings:
    """The task's held-out prompts as an evaluation."""
    return EvaluationSettings(
        prompts=task.held_out,
        prompt_field=task.prompt_field,
        answer_field=task.answer_field,
        judge=task.judge,
        max_tokens=task.max_tokens,
        stop=task.stop,
        temperature=task.temperature,
        chat=task.chat,
    )

"""The kind `harbor`, named by a folder of tasks in Harbor's layout."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from rollq.buffer.common.mappings import filled
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.environments.episodes import ENV
from rollq.environments.harbor.tasks import FILES, HarborTask, digest_of, tasks_in
from rollq.environments.kinds import Finding, path_in
from rollq.environments.options import read_options
from rollq.workers.gateway.harnesses.enclosure import check_place

IMAGE_OF: Final = "rollq.environments.harbor.images.image_of"
JUDGE: Final = "rollq.environments.harbor.judge.JUDGE"
WORKSPACE: Final = "workspace"
"""The column with the folder to copy for the command."""


class HarborOptions(Settings):
    """`env_options`."""

    command: tuple[str, ...] = Field(default=(), description="the agent and its arguments")
    workdir: str = Field(default="/app", description="the path where the agent and the tests see the workspace")
    without_images: bool = Field(
        default=False, description="run tasks that have an image with the worker's programs, not in a container"
    )

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, path: str) -> str:
        check_place(path)
        return path


class Harbor:
    """See `Kind`."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> "TaskFolder":
        """The tasks of one folder. Raises `ConfigError`, including for tasks with several containers."""
        given = read_options(HarborOptions, options)
        path = path_in(folder, name)
        tasks = tasks_in(path, split)
        if not given.without_images and (task := next((task for task in tasks if task.compose()), None)):
            raise ConfigError(
                f"{task.path} has several containers ({task.compose()}), and rollq starts one: run the worker where "
                "their programs are installed, and set env_options.without_images = true"
            )
        return TaskFolder(path, tasks, given, split)

    def installed(self) -> str:
        """No package is needed."""
        return "built in"

    def install(self) -> str:
        """How to install the kind's requirements."""
        return "nothing to install: name a folder of tasks"

    def names(self) -> Iterable[str]:
        """Only the user knows the folders."""
        return ()


class TaskFolder:
    """The tasks of one split: see `Source`."""

    def __init__(self, folder: Path, tasks: tuple[HarborTask, ...], options: HarborOptions, split: str) -> None:
        self.folder, self.tasks, self.options, self.split = folder, tasks, options, split

    def identity(self) -> dict[str, str]:
        """See `Source.identity`."""
        return {"files": digest_of(self.tasks), "workdir": self.options.workdir, "split": self.split}

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each task, ordered by name. Raises `ConfigError`."""
        for task in self.tasks:
            yield {"prompt": task.instruction(), ENV: {"task": task.name}, WORKSPACE: f"{task.name}/{FILES}"}

    def settings(self) -> dict[str, Any]:
        """The loop `harness` with the row's files and the longest time limit of a task, and the judge that runs
        tests."""
        images = 0 if self.options.without_images else sum(task.has_image() for task in self.tasks)
        options = {
            "command": list(self.options.command),
            "workspace": str(self.folder),
            "workspace_field": WORKSPACE,
            "images": IMAGE_OF if images else "",
            "workspace_at": self.options.workdir if images < len(self.tasks) else "",
            "timeout_s": max((task.settings().agent.timeout_sec or 0 for task in self.tasks), default=0),
        }
        return {
            "answer_field": "",
            "judge": JUDGE,
            "judge_options": {
                "folder": str(self.folder),
                "split": self.split,
                "workdir": self.options.workdir,
                "containers": not self.options.without_images,
            },
            "agent_loop": "harness",
            "agent_options": filled(options),
        }

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """See `Source.check`."""
        from rollq.environments.harbor.checking import check

        return check(self.folder, self.options.workdir, not self.options.without_images, rows)

"""Tasks' images, each built from the task's files or pulled, once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rollq.buffer.errors import ConfigError
from rollq.environments.harbor.tasks import FILES, HarborTask
from rollq.workers.gateway.harnesses.containers import ContainerError, call, find_program

BUILD_S: Final = 3600.0


def image_of(files: Path) -> str:
    """The image of the task whose files are in this folder; empty without one. Raises `ConfigError`."""
    return HarborTask(files.parent.parent, files.parent.name).image()


def require_program(task: HarborTask) -> str:
    """The program that starts containers, for a task with an image. Raises `ConfigError` if there is none."""
    try:
        return find_program()
    except ContainerError as error:
        raise ConfigError(
            f"{task.path} has an image ({task.image()}), which needs podman or docker ({error}): install one of them, "
            "or run the worker where the programs of the image are installed, and set env_options.without_images = true"
        ) from error


def make_images(program: str, tasks: Iterable[HarborTask]) -> None:
    """Build or pull missing images of tasks. Raises `ConfigError`."""
    for image, task in {task.image(): task for task in tasks}.items():
        try:
            call(program, "image", "inspect", image)
        except ContainerError:
            _make(program, image, task)


def _make(program: str, image: str, task: HarborTask) -> None:
    try:
        if task.settings().environment.docker_image:
            call(program, "pull", image, timeout_s=BUILD_S)
        else:
            call(program, "build", "--network=host", "--tag", image, str(task.path / FILES), timeout_s=BUILD_S)
    except ContainerError as error:
        raise ConfigError(f"{task.path}: its image cannot be built: {error}") from error

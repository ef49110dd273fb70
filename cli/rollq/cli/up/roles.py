"""The roles that a settings file needs, and checks before any role starts."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollq.buffer.errors import ConfigError
from rollq.cli.run_location import fingerprints
from rollq.cli.settings.model import RollqSettings

ROLLQ = (sys.executable, "-P", "-m", "rollq.cli.main")
"""The command `rollq`. `-P`: user code comes from the settings file's folder, never from the working folder."""


class RoleCommand(NamedTuple):
    """A role and its command. `finishes` says whether the role ends when its work is done."""

    name: str
    command: tuple[str, ...]
    finishes: bool = False


def role_commands(settings: RollqSettings, file: Path, workers: int) -> Iterator[RoleCommand]:
    """The roles, in the order for starting them and for asking them to stop."""
    if settings.trainer:
        yield RoleCommand("trainer", (*ROLLQ, "train", str(file)), finishes=True)
    if settings.produced_tasks() or settings.evaluations:
        yield RoleCommand("producer", (*ROLLQ, "produce", str(file)))
    if settings.served_tasks():
        for name in (f"worker-{number}" for number in range(1, workers + 1)):
            yield RoleCommand(name, (*ROLLQ, "work", str(file), "--name", name))
    if settings.archive.url:
        yield RoleCommand("archiver", (*ROLLQ, "archive", str(file)))


def check_roles(settings: RollqSettings, file: Path) -> None:
    """Raise `ConfigError` for anything that a role would refuse at start: prompts, hooks, judges, models, folders,
    GPUs."""
    from rollq.cli.settings.environment_rows import write_missing_prompts
    from rollq.producer.run import open_prompts

    if not any(role_commands(settings, file, 1)):
        raise ConfigError(f"{file}: there is nothing to run: every task has offline = true, and there is no [trainer]")
    _check_folders(settings)
    _check_devices(settings)
    sys.path.append(str(file.absolute().parent))
    write_missing_prompts(settings, file)
    with open_prompts(settings.produced_tasks(), settings.evaluations, settings.row_readers()):
        pass
    model = settings.worker.options.get("model")
    if settings.served_tasks():
        fingerprints(model, settings.worker.tokenizer or model, "worker.options.model")
        asyncio.run(_check_recipes(settings))
    if settings.trainer:
        fingerprints(settings.trainer.model, settings.trainer.model, "trainer.model")


def _check_folders(settings: RollqSettings) -> None:
    from rollq.buffer.payloads.folders_and_buckets import Folder

    for setting, url in (("archive.url", settings.archive.url), ("payloads.url", settings.payloads.url)):
        if url and not url.startswith("s3:"):
            Folder(url, setting)


def _check_devices(settings: RollqSettings) -> None:
    devices = {"worker.options.device": settings.worker.options.get("device")} if settings.served_tasks() else {}
    if settings.trainer:
        devices["trainer.device"] = settings.trainer.device
    for setting, device in devices.items():
        if str(device).startswith("cuda"):
            import torch  # imported late: it takes seconds

            index = str(device).partition(":")[2]
            if (int(index) if index.isdecimal() else 0) >= torch.cuda.device_count():
                raise ConfigError(f"{setting} = {device!r}: torch does not find this GPU; use 'cpu' without one")


async def _check_recipes(settings: RollqSettings) -> None:
    from rollq.workers.groups.recipes import check_templates, make_recipes
    from rollq.workers.judging.process_pool import JudgePool
    from rollq.workers.run import make_tokenizer

    tasks, worker = settings.served_tasks(), settings.worker
    processes = JudgePool(worker.judge_processes)
    recipes = make_recipes(tasks, worker, settings.seed, processes)
    if worker.chat_template or any(task.template_options for task in tasks.values()):  # a tokenizer takes seconds
        check_templates(recipes, make_tokenizer(worker))
    for recipe in recipes.values():
        await recipe.close()
    await processes.close()

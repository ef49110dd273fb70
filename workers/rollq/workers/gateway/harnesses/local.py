"""The agent loop `harness` runs one process per sample, which calls the model through the gateway.

The command gets the prompt on its standard input and in a file, and its session's addresses and token in variables that
OpenAI's and Anthropic's clients read.
"""

import asyncio
import logging
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rollq.buffer.common import exact_json
from rollq.buffer.common.child_processes import INHERITED
from rollq.buffer.common.ending import cancel
from rollq.buffer.common.mappings import filled
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.process_environment import hide_environment
from rollq.buffer.common.sealing.kernel import hide_memory
from rollq.buffer.common.user_functions import inside
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Sample
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.loops import Rollout, check_length, failed
from rollq.workers.agents.turns import ChatFormat
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.gateway.harnesses.containers import (
    METADATA,
    Container,
    ContainerError,
    Containers,
    find_program,
    remove_left_containers,
)
from rollq.workers.gateway.harnesses.enclosure import LEAST_PROCESSES, Enclosure, check_place, problem
from rollq.workers.gateway.harnesses.given import prompt_bytes, session_variables
from rollq.workers.gateway.harnesses.process import HarnessFolder, HarnessProcess, remove_left_folders, sessions_folder
from rollq.workers.gateway.harnesses.row_workspace import row_workspace
from rollq.workers.gateway.open_sessions import Gateway, new_token
from rollq.workers.gateway.session_settings import SessionSettings
from rollq.workers.gateway.sessions.finished_sample import Chooser
from rollq.workers.gateway.sessions.session import SETTLE_S, Session

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""A stopped group is noticed within this many seconds."""


class HarnessSettings(SessionSettings):
    """`agent_options` of the loop `harness`."""

    command: tuple[str, ...] = Field(min_length=1, description="the program and its arguments")
    env: dict[str, str] = Field(
        default_factory=dict, description="variables of the command, in addition to the session's"
    )
    workspace: Path | None = Field(
        default=None, description="folder that is copied for each sample, where the command runs; default: empty"
    )
    workspace_field: str = Field(
        default="", description="name in the rows' metadata of the folder in workspace to copy; default: all of it"
    )
    workspace_at: str = Field(
        default="", description="path, as /app, at which the command sees its workspace too; needs namespaces of Linux"
    )
    images: str = Field(
        default="",
        description="function by dotted path that names the image of a row's folder in workspace; such commands run in "
        "containers of podman or docker",
    )
    mounted: tuple[Path, ...] = Field(
        default=(), description="folders of this machine that containers show at the same path, read-only"
    )
    timeout_s: float = Field(default=600, gt=0, description="longest run of a command, in seconds")
    max_file_mb: float = Field(
        default=256,
        gt=0,
        le=1e9,
        description="largest file that a command can write, including its output, in megabytes",
    )
    program_rewards: bool = Field(
        default=False, description="whether the command, and all that the model runs in it, may set its reward"
    )
    max_processes: int = Field(
        default=1000, ge=LEAST_PROCESSES, description="processes and threads of a command at the same time"
    )
    writable: tuple[Path, ...] = Field(
        default=(), description="folders that commands may write to, beside their own and temporary ones"
    )
    concurrent: int = Field(default=16, gt=0, description="commands at the same time, in one worker")

    @field_validator("workspace_at")
    @classmethod
    def _check_place(cls, path: str) -> str:
        if path:
            check_place(path)
        return path

    @property
    def max_file_bytes(self) -> int:
        """The largest file, in bytes."""
        return math.ceil(self.max_file_mb * 1e6)


@dataclass(frozen=True, slots=True)
class Harness:
    """Runs a command for each sample. An interrupted command starts again, and gets recorded answers to the calls that
    it repeats."""

    settings: HarnessSettings
    gateway: Gateway
    chat_format: ChatFormat
    chosen: Chooser | None
    is_enclosed: bool
    containers: Containers | None = None
    resumable: ClassVar[bool] = True
    records: ClassVar[bool] = True

    @property
    def sessions(self) -> int:
        """See `AgentLoop`."""
        return self.settings.concurrent

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ConfigError` if the loop cannot parse turns with this tokenizer."""
        self.chat_format.check(tokenizer)

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`."""
        check_length(rollout)
        folder, container = await self._make_folder(rollout)
        session = Session(rollout, self.chat_format, self.settings.limits, self.chosen)
        token = new_token()
        reward_token = token if self.settings.program_rewards else ""
        with self.gateway.serving(session, token=token, reward_token=reward_token):
            return await self._run(rollout, session, folder, container, token)

    async def _make_folder(self, rollout: Rollout) -> tuple[HarnessFolder, Container | None]:
        """A new folder and, for a row with an image, its container. Both are removed even if this call is cancelled,
        because the call's thread still makes them.

        Raises `SampleFailed` if the row names no workspace, or its container does not start.
        """
        making = asyncio.ensure_future(asyncio.to_thread(self._made_folder, rollout))
        try:
            return await asyncio.shield(making)
        finally:
            await asyncio.wait([making])
            if making.exception() is None:
                rollout.at_end(partial(_remove, *making.result()))

    def _made_folder(self, rollout: Rollout) -> tuple[HarnessFolder, Container | None]:
        template, field, metadata = self.settings.workspace, self.settings.workspace_field, rollout.prompt.metadata
        if field and template is not None:
            template = row_workspace(template, field, metadata)
        image = self.containers.image_of(template) if self.containers and template is not None else ""
        sample = "-".join(rollout.session.split("/")[:-1])  # the same in each attempt
        folder = HarnessFolder.make(None if image else template, sample)
        try:
            folder.metadata.write_bytes(exact_json.dumps(dict(metadata)))
            return folder, self.containers.started(folder, image) if self.containers and image else None
        except BaseException:
            folder.remove()
            raise

    async def _run(
        self, rollout: Rollout, session: Session, folder: HarnessFolder, container: Container | None, token: str
    ) -> Sample:
        """Run the command until it exits, its session is closed, or its time is up. Returns the sample."""
        prompt = prompt_bytes(rollout.prompt)
        command: Sequence[str] = self.settings.command
        facts = {"ROLLQ_SESSION_METADATA": str(folder.metadata) if container is None else METADATA}
        variables = {**session_variables(self.gateway, token), **facts, **self.settings.env}
        if container is not None:
            command, variables = container.command(command, variables)
        process = await HarnessProcess.start(
            command,
            folder,
            variables,
            prompt,
            max_file_bytes=self.settings.max_file_bytes,
            enclosure=make_enclosure(self.settings, folder.root) if self.is_enclosed and container is None else None,
        )
        try:
            exit_code = await self._until_ended(process, session, rollout)
            is_closed = session.closed.is_set()
            await session.settle()
        finally:
            session.closed.set()
            await process.end()
            if container is not None:
                with suppress(ContainerError):  # the judging code stops it again
                    await asyncio.to_thread(container.stop)
            await session.stop()
        if (stopped := session.stopped_sample()) is not None:
            return stopped
        links = await asyncio.to_thread(folder.remove_foreign_links)
        return self._sample(session, folder, filled({"removed_links": links}), exit_code, is_closed)

    async def _until_ended(self, process: HarnessProcess, session: Session, rollout: Rollout) -> int | None:
        """The command's exit code; None if it is still running because its session was closed or its time is up."""
        exiting = asyncio.ensure_future(process.wait())
        closing = asyncio.ensure_future(session.closed.wait())
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.settings.timeout_s
        try:
            while not rollout.is_stopped() and (left_s := deadline_s - loop.time()) > 0:
                await asyncio.wait([exiting, closing], timeout=min(LOOK_S, left_s), return_when=asyncio.FIRST_COMPLETED)
                if exiting.done() or closing.done():
                    break
            if session.closed.is_set():  # the command makes no further calls, but may still clean up
                await asyncio.wait([exiting], timeout=SETTLE_S)
            return exiting.result() if exiting.done() else None
        finally:
            await cancel([exiting, closing])

    def _sample(
        self, session: Session, folder: HarnessFolder, counts: Mapping[str, int], exit_code: int | None, is_closed: bool
    ) -> Sample:
        tail = folder.tail()
        facts = {"exit_code": exit_code, "output": tail, "workspace": str(folder.workspace), **counts}
        made = session.sample(extra={"harness": facts})
        if exit_code and not is_closed:
            problem = f"the command ended with exit code {exit_code}{self._too_large(folder, exit_code)}"
            return replace(failed(f"{problem}: {tail[-500:] or 'it wrote nothing'}"), extra=made.extra)
        return session.ended(made, out_of_time=exit_code is None and not is_closed)

    def _too_large(self, folder: HarnessFolder, exit_code: int) -> str:
        """The error message's end if the command failed because a file became too large; empty for other causes."""
        if exit_code == 128 + signal.SIGXFSZ or folder.output_bytes() >= self.settings.max_file_bytes:
            return f", since its output or another file reached max_file_mb = {self.settings.max_file_mb:g}"
        return ""


def _check_places(settings: HarnessSettings) -> None:
    """Raise `ConfigError` for a program or a folder that does not exist."""
    program = settings.command[0]
    if "/" not in program and not settings.images and shutil.which(program) is None:
        raise ConfigError(f"agent_options.command: {program!r} is not on the PATH of this worker")
    if settings.workspace is not None:
        _check_folder("workspace", settings.workspace)
    elif settings.workspace_field:
        raise ConfigError("agent_options.workspace_field names folders in agent_options.workspace, which is missing")
    for place in settings.writable:
        _check_folder("writable", place)


def _check_folder(option: str, place: Path) -> None:
    if not place.is_dir():
        raise ConfigError(f"agent_options.{option}: {str(place)!r} is not a folder")


def harness_loop(gateway: Gateway, **options: Any) -> Harness:
    """The loop `harness` from its `agent_options`. Raises `ConfigError`, and `ValidationError` for invalid options."""
    settings = HarnessSettings(**options)
    _check_places(settings)
    gateway.want()
    remove_left_folders()
    containers = make_containers(settings)
    hide_environment(INHERITED)
    is_enclosed = can_enclose(settings)
    if settings.workspace_at and not is_enclosed:
        raise ConfigError(
            f'agent_options.workspace_at = "{settings.workspace_at}" needs namespaces of Linux, which this system does '
            "not give; see Agents on the page Security of the guide"
        )
    return Harness(
        settings=settings,
        gateway=gateway,
        chat_format=make_format(settings.tool_parser, settings.reasoning_parser),
        chosen=make_chooser(settings.calls),
        is_enclosed=is_enclosed,
        containers=containers,
    )


def make_containers(settings: HarnessSettings) -> Containers | None:
    """The containers for rows with an image; None without `images`. Removes killed workers' containers. Raises
    `ConfigError`."""
    if not settings.images:
        return None
    if not settings.workspace_field:
        raise ConfigError("agent_options.images names images of folders of rows: set workspace_field too")
    with inside("agent_options.images"):
        image_of = load_plugin("function", settings.images, {})
    try:
        program = find_program()
        remove_left_containers(program, sessions_folder())
    except ContainerError as error:
        raise ConfigError(f"agent_options.images needs podman or docker: {error}") from error
    return Containers(program, image_of, settings.max_processes, settings.timeout_s, settings.mounted)


def _remove(folder: HarnessFolder, container: Container | None) -> None:
    if container is not None:
        container.remove()
    folder.remove()


def make_enclosure(settings: HarnessSettings, root: Path) -> Enclosure:
    """The enclosure for the command of the session in the folder `root`. The enclosure hides the files with the
    worker's secrets, and the folder of all rows' workspaces."""
    hidden = secret_files()
    if settings.workspace is not None and settings.workspace_field:
        hidden += (os.path.realpath(settings.workspace), *repositories_above(settings.workspace))
    return Enclosure(
        root=str(root),
        writable=tuple(str(path.absolute()) for path in settings.writable),
        hidden=hidden,
        places=((str(root / "workspace"), settings.workspace_at),) if settings.workspace_at else (),
        most_processes=settings.max_processes,
        most_bytes=settings.max_file_bytes,
    )


def secret_files() -> tuple[str, ...]:
    """The files with the worker's secrets."""
    paths = [value for name, value in os.environ.items() if name.startswith("ROLLQ_") and name.endswith("_FILE")]
    return tuple(os.path.abspath(path) for path in paths if path)


def repositories_above(folder: Path) -> tuple[str, ...]:
    """The repository data above a folder, which holds all versions of its files."""
    return tuple(str(parent / ".git") for parent in folder.resolve().parents if (parent / ".git").exists())


def can_enclose(settings: HarnessSettings) -> bool:
    """Return whether commands can be enclosed here. If not, log the reason, and protect this process's memory from
    other processes."""
    folder = HarnessFolder.make(None)
    try:
        found = problem(make_enclosure(settings, folder.root))
    finally:
        folder.remove()
    if found:
        log.warning(
            "commands of agents are not separated from each other on this system: they can change each other's files, "
            "and files of this worker's user (%s); see Agents on the page Security of the guide",
            found,
        )
        with suppress(OSError):  # needs Linux
            hide_memory()
    return not found


def make_chooser(path: str) -> Chooser | None:
    """The function that chooses the calls to train; None for all. Raises `ConfigError`."""
    if path == "all":
        return None
    with inside("agent_options.calls"):
        chooser: Chooser = load_plugin("function", path, {})
    return chooser

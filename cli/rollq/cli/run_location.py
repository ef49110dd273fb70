"""Finds a run's servers and opens the run, every command's first step."""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypedDict

from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.user_functions import inside
from rollq.buffer.errors import ConfigError, ServerRefused
from rollq.buffer.rules.settings import PayloadSettings, RedisSettings
from rollq.buffer.rules.shards import check_shards
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.redis_url import complete_url
from rollq.buffer.tickets import open_queue
from rollq.cli.options import DEFAULT_FILE
from rollq.cli.settings.file import load_settings, payloads_from, redis_from
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_settings import JudgedPrompts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLocation:
    """A run's servers, name and archive, and the settings file that named them, if there is one.

    Its repr holds no password.
    """

    run: str
    buffer_url: str = field(repr=False)
    queue_url: str = field(repr=False)
    password: str | None = field(repr=False)
    payloads: PayloadSettings
    archive_url: str | None = None
    file: Path | None = None

    @classmethod
    def from_settings(cls, settings: RollqSettings) -> Self:
        """The location that `rollq.toml` names."""
        location = cls._of(settings.run, settings.redis, settings.payloads)
        return replace(location, archive_url=settings.archive.url)

    @classmethod
    def at(cls, url: str, run: str, environment: Mapping[str, str] = os.environ) -> Self:
        """A run whose buffer is at `url`. The environment gives the queue, user, password, TLS files and payload URL;
        by default, the queue is on the buffer's server."""
        redis = redis_from(environment).model_copy(update={"buffer_url": url})
        return cls._of(run, redis, payloads_from(environment))

    @classmethod
    def _of(cls, run: str, redis: RedisSettings, payloads: PayloadSettings) -> Self:
        files = (redis.ca_file, redis.certificate_file, redis.key_file)
        buffer_url = complete_url(redis.buffer_url, redis.user, *files)
        queue_url = complete_url(redis.queue_url, redis.user, *files) if redis.queue_url else buffer_url
        password = redis.password.get_secret_value() if redis.password else None
        return cls(run, buffer_url, queue_url, password, payloads)

    def buffer(self, stop: threading.Event | None = None) -> Buffer:
        """Connect to the run's buffer. Setting `stop` ends its waits for the server.

        Raises `ServerUnavailable`, `ServerRefused`.
        """
        patience = Patience(closed=stop or threading.Event())
        return Buffer.connect(
            self.buffer_url, self.run, password=self.password, patience=patience, payloads=self.payloads
        )

    def to_look_at(self, patience: Patience | None = None) -> Buffer:
        """Connect to the run's buffer to inspect groups. If the payloads' folder or bucket is unavailable, connect
        without it, and log the reason."""
        try:
            return Buffer.connect(
                self.buffer_url, self.run, password=self.password, patience=patience, payloads=self.payloads
            )
        except (ConfigError, ServerRefused) as error:
            if not self.payloads.url:
                raise
            log.warning("samples outside the server are not shown: %s", error)
            return self.without_payloads(patience)

    def without_payloads(self, patience: Patience | None = None) -> Buffer:
        """Connect to the run's buffer to inspect its numbers; the folder or bucket of large payloads is not needed."""
        limit = PayloadSettings(max_buffer_bytes=self.payloads.max_buffer_bytes)
        return Buffer.connect(self.buffer_url, self.run, password=self.password, patience=patience, payloads=limit)

    def queue(self) -> Queue:
        """The run's queue of tickets, not connected yet."""
        return open_queue(self.queue_url, self.run, password=self.password)


def find_run(file: Path | None, url: str | None, run: str | None) -> RunLocation:
    """The location given by a command's FILE, by default the rollq.toml of this folder, or by its --url and --run.

    Raises `ConfigError` for both, for neither, and for an incomplete location.
    """
    if not (file or url or run):
        if not DEFAULT_FILE.exists():
            raise ConfigError(
                f"there is no {DEFAULT_FILE} in this folder: name the file of the run, or give --url and --run"
            )
        file = DEFAULT_FILE
    if file is not None and not url and not run:
        return replace(RunLocation.from_settings(load_settings(file)), file=file)
    if file is None and url and run:
        return RunLocation.at(url, run)
    raise ConfigError("give either FILE (rollq.toml), or both --url and --run")


class Fingerprints(TypedDict):
    """Fingerprints of a model's architecture and of a tokenizer; empty if a role has none."""

    model: str
    tokenizer: str


def fingerprints(model: Path | None, tokenizer: Path | None, setting: str) -> Fingerprints:
    """Fingerprints of a model's architecture and of a tokenizer, for `open_run`; empty for None.

    Raises `ConfigError` for a folder without a model; the message names `setting`, which gave the folder.
    """
    from rollq.workers.tokenizers.hugging_face import TOKENIZER_FILE, model_fingerprint, tokenizer_fingerprint

    with inside(setting):
        has_tokenizer = tokenizer is not None and (tokenizer / TOKENIZER_FILE).exists()
        return {
            "model": model_fingerprint(model) if model else "",
            "tokenizer": tokenizer_fingerprint(tokenizer) if tokenizer and has_tokenizer else "",
        }


def templates(settings: RollqSettings) -> dict[str, str]:
    """Identities of the templates that render prompts, including options, by name, such as `chat template of
    tasks.sums`. Empty if workers have no tokenizer. Raises `ConfigError` for a broken template."""
    from rollq.workers.tokenizers.templates import template_identity

    worker = settings.worker
    judged: dict[str, Mapping[str, JudgedPrompts]] = {"tasks": settings.tasks, "evaluations": settings.evaluations}
    folder = worker.tokenizer or worker.options.get("model")
    if folder is None:
        return {}
    return {
        f"chat template of {root}.{name}": template_identity(Path(folder), worker.chat_template, table.template_options)
        for root, tables in judged.items()
        for name, table in tables.items()
        if not getattr(table, "offline", False)
    }


def open_run(
    settings: RollqSettings,
    stop: threading.Event,
    *,
    model: str = "",
    tokenizer: str = "",
    identities: Mapping[str, str] | None = None,
    check: Callable[[Buffer], None] = lambda buffer: None,
) -> Buffer:
    """Connect to the buffer of the run and register its tasks; the first role creates both.

    `check` may refuse the run before any of its rules change. `model` and `tokenizer` are fingerprints, empty for a
    role without a model or tokenizer; `BufferCore.create_run` describes `identities`. Raises
    `RunMismatch` when the run was created with other settings, `ServerUnavailable`, `ServerRefused`.
    """
    buffer = RunLocation.from_settings(settings).buffer(stop)
    try:
        buffer.create_run(model=model, tokenizer=tokenizer, identities=identities)
        check(buffer)
        tasks = settings.all_tasks()
        check_shards(buffer.tasks(), tasks)
        for name, task in tasks.items():
            buffer.register_task(name, task)
    except BaseException:
        buffer.close()
        raise
    return buffer

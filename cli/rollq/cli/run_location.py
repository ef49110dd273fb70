"""What every role does first: find the servers, create the run or compare with the one that exists."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.connection import Patience
from rollq.buffer.tickets import open_queue
from rollq.cli.settings import RollqSettings
from rollq.cli.settings_file import load_settings, password_from


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Where a run is. Its repr holds no password."""

    run: str
    buffer_url: str = field(repr=False)
    queue_url: str = field(repr=False)
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, settings: RollqSettings) -> Self:
        """The place that `rollq.toml` names."""
        redis = settings.redis
        password = redis.password.get_secret_value() if redis.password else None
        return cls(settings.run, redis.buffer_url, redis.queue_url or redis.buffer_url, password)

    @classmethod
    def at(cls, url: str, run: str, environment: Mapping[str, str] = os.environ) -> Self:
        """A run on one server, with the password of the environment."""
        return cls(run, url, url, password_from(environment))

    def buffer(self, stop: threading.Event | None = None) -> Buffer:
        """The run's buffer. Setting `stop` ends its waits for the server. Raises ServerUnavailable, ServerRefused."""
        patience = Patience(closed=stop or threading.Event())
        return Buffer.connect(self.buffer_url, self.run, password=self.password, patience=patience)

    def queue(self) -> Queue:
        """The run's queue of tickets, not connected yet."""
        return open_queue(self.queue_url, self.run, password=self.password)


def find_run(file: Path | None, url: str | None, run: str | None) -> RunLocation:
    """The place that a command's FILE names, or its --url and --run. Raises `ConfigError` for neither and for both."""
    if file is not None and not url and not run:
        return RunLocation.of(load_settings(file))
    if file is None and url and run:
        return RunLocation.at(url, run)
    raise ConfigError("give either FILE (rollq.toml), or both --url and --run")


def fingerprints(model: Path | None, tokenizer: Path | None) -> dict[str, str]:
    """What `open_run` compares: of the model's architecture and of the tokenizer; empty for what there is not.

    Raises `ConfigError` for a folder that holds no model.
    """
    from rollq.workers.tokenizers.hugging_face import TOKENIZER_FILE, model_fingerprint, tokenizer_fingerprint

    return {
        "model": model_fingerprint(model) if model else "",
        "tokenizer": tokenizer_fingerprint(tokenizer) if tokenizer and (tokenizer / TOKENIZER_FILE).exists() else "",
    }


def open_run(settings: RollqSettings, stop: threading.Event, *, model: str = "", tokenizer: str = "") -> Buffer:
    """The buffer of the run, its tasks registered; whichever role comes first creates both.

    `model` and `tokenizer` are fingerprints, empty for a role that has none. Raises `RunMismatch` when this role's
    settings are not those that the run was created with, `ServerUnavailable`, `ServerRefused`.
    """
    buffer = RunLocation.of(settings).buffer(stop)
    try:
        buffer.create_run(model=model, tokenizer=tokenizer)
        for name, task in settings.all_tasks().items():
            buffer.register_task(name, task)
    except BaseException:
        buffer.close()
        raise
    return buffer

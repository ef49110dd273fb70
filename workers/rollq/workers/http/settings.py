"""Settings for all requests to servers: the engine over HTTP, judges and auxiliary models."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.workers.http.retries import RetryPolicy

if TYPE_CHECKING:
    from rollq.workers.http.server_pool import JsonCaller


class RetrySettings(Settings):
    """How long to wait for an answer, and how often to try again."""

    request_timeout_s: float = Field(default=60, gt=0, description="longest wait for one answer, in seconds")
    retries: int = Field(default=4, ge=0, description="retries after a 429, a 5xx, a lost connection or a timeout")

    FIRST_PAUSE_S: ClassVar[float] = 0.5
    """The seconds before the first retry; the pause doubles with each retry."""
    LONGEST_PAUSE_S: ClassVar[float] = 10.0
    REMOVED: ClassVar[Mapping[str, str]] = {
        "retry_first_s": "the pause before the first retry is 0.5 s, and doubles with each; leave it out",
        "retry_longest_s": "the longest pause before a retry is 10 s, to an engine's server 30 s; leave it out",
    }

    @property
    def retry_policy(self) -> RetryPolicy:
        """When to try again."""
        return RetryPolicy(self.retries, self.FIRST_PAUSE_S, self.LONGEST_PAUSE_S)


class HttpClientSettings(RetrySettings):
    """Settings of the servers beside the engine: judges and auxiliary models."""

    concurrent: int = Field(default=64, gt=0, description="requests to one server at the same time")

    def caller(self, urls: Sequence[str], key: str) -> "JsonCaller":
        """A client for the servers at `urls`; `key` is the environment variable with their key, if they need one.

        Raises `ConfigError` if the HTTP package is not installed.
        """
        try:
            from rollq.workers.http.server_pool import JsonCaller
        except ModuleNotFoundError as error:
            raise ConfigError(f"{urls[0]!r} needs the package {error.name!r}: pip install 'rollq[openai]'") from error
        return JsonCaller(urls, self.retry_policy, self.request_timeout_s, self.concurrent, os.environ.get(key))

"""How servers beside the engine (judges, auxiliary models) are asked: settings that they share."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from rollq.buffer.errors import ConfigError
from rollq.buffer.settings import Settings
from rollq.workers.http.retries import RetryPolicy

if TYPE_CHECKING:
    from rollq.workers.http.client import JsonCaller


class HttpClientSettings(Settings):
    """How long, how many at a time, and how often."""

    request_timeout_s: float = Field(default=60, gt=0, description="longest wait for one answer")
    concurrent: int = Field(default=64, gt=0, description="requests to a server at the same time")
    retries: int = Field(default=4, ge=0, description="more tries after a 429, a 5xx, a lost connection or a timeout")
    retry_first_s: float = Field(default=0.5, gt=0, description="pause before the second try; it doubles")
    retry_longest_s: float = Field(default=10, gt=0, description="longest such pause")

    def caller(self, urls: Sequence[str], key: str) -> "JsonCaller":
        """What asks the servers at `urls`; their key is in the environment variable `key`, if they want one.

        Raises `ConfigError` when the package that it needs is missing.
        """
        try:
            from rollq.workers.http.client import JsonCaller
        except ModuleNotFoundError as error:
            raise ConfigError(f"{urls[0]!r} needs the package {error.name!r}: pip install 'rollq[openai]'") from error
        policy = RetryPolicy(self.retries, self.retry_first_s, self.retry_longest_s)
        return JsonCaller(urls, policy, self.request_timeout_s, self.concurrent, os.environ.get(key))

"""Options of built-in judges: table `judge_options` of a task."""

import os
import re
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from rollq.buffer.errors import ConfigError
from rollq.buffer.settings import Settings
from rollq.workers.retries import RetryPolicy

if TYPE_CHECKING:
    from rollq.workers.http import JsonCaller

API_KEY = "ROLLQ_JUDGE_API_KEY"
"""Environment variable with the key of the server behind judge `http`, if it wants one."""


class NoOptions(Settings):
    """Of judges that take none."""


class RegexOptions(Settings):
    """Of `regex`."""

    pattern: str = Field(
        description="Python's regular expression; what it finds last is the answer, by its first group"
    )
    compare: bool = Field(default=True, description="false: that it occurs is enough")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class HttpOptions(Settings):
    """Of `http`."""

    url: str = Field(pattern=r"^https?://\S+$", description="takes prompt, answer, metadata and text as JSON by POST")
    request_timeout_s: float = Field(default=30, gt=0, description="longest wait for one answer")
    concurrent: int = Field(default=64, gt=0, description="requests at the same time")
    retries: int = Field(default=4, ge=0, description="more tries after a 429, a 5xx, a lost connection or a timeout")
    retry_first_s: float = Field(default=0.5, gt=0, description="pause before the second try; it doubles")
    retry_longest_s: float = Field(default=10, gt=0, description="longest such pause")

    def caller(self) -> "JsonCaller":
        """What asks the server. Raises `ConfigError` when the package that it needs is missing."""
        try:
            from rollq.workers.http import JsonCaller
        except ModuleNotFoundError as error:
            raise ConfigError(f"judge 'http' needs the package {error.name!r}: pip install 'rollq[openai]'") from error
        policy = RetryPolicy(self.retries, self.retry_first_s, self.retry_longest_s)
        return JsonCaller(self.url, policy, self.request_timeout_s, self.concurrent, os.environ.get(API_KEY))


class Part(Settings):
    """One judge of several."""

    judge: str = Field(description="name of a built-in judge, or a dotted path of your own")
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


class WeightedOptions(Settings):
    """Of `weighted`."""

    parts: dict[str, Part] = Field(min_length=1, description="name of the part of the reward -> judge and weight")

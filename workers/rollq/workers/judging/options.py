"""Options of built-in judges: table `judge_options` of a task."""

import re
from typing import Any

from pydantic import Field, field_validator

from rollq.buffer.settings import Settings
from rollq.workers.http.settings import HttpClientSettings

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


class HttpOptions(HttpClientSettings):
    """Of `http`."""

    url: str = Field(pattern=r"^https?://\S+$", description="takes prompt, answer, metadata and text as JSON by POST")


class Part(Settings):
    """One judge of several."""

    judge: str = Field(description="name of a built-in judge, or a dotted path of your own")
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


class WeightedOptions(Settings):
    """Of `weighted`."""

    parts: dict[str, Part] = Field(min_length=1, description="name of the part of the reward -> judge and weight")

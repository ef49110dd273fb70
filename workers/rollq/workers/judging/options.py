"""Options of built-in judges: table `judge_options` of a task."""

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from rollq.buffer.common.matching import HTTP_URL
from rollq.buffer.rules.settings import Settings
from rollq.workers.http.settings import HttpClientSettings

API_KEY = "ROLLQ_JUDGE_API_KEY"
"""The environment variable with the key of judge `http`'s server, if the server needs one."""


NONE = "none"
"""The judge of tasks with only a group judge."""


class NoOptions(Settings):
    """Options of judges without options."""


class EnvironmentOptions(Settings):
    """Options of judge `environment`."""

    turn_rewards: bool = Field(
        default=False, description="also give each turn what its step earned, for [trainer] credit"
    )


class RegexOptions(Settings):
    """Options of judge `regex`."""

    pattern: str = Field(description="Python regular expression; the first group of its last match is the answer")
    compare: bool = Field(default=True, description="false: any match is enough")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern


class HttpOptions(HttpClientSettings):
    """Options of judge `http`."""

    url: Annotated[str, HTTP_URL] = Field(description="takes prompt, answer, metadata and text as JSON by POST")


class Part(Settings):
    """One part of judge `weighted`."""

    judge: str = Field(description="name of a built-in judge, or the dotted path of a custom judge")
    weight: float = Field(default=1.0, description="factor of this part in the reward")
    options: dict[str, Any] = Field(default_factory=dict, description="options of this judge")

    @field_validator("judge")
    @classmethod
    def _gives_a_reward(cls, value: str) -> str:
        if value == NONE:
            raise ValueError(f"{NONE!r} gives no reward; name another judge")
        return value


class WeightedOptions(Settings):
    """Options of judge `weighted`."""

    parts: dict[str, Part] = Field(min_length=1, description="name of the part of the reward -> judge and weight")

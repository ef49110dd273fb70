"""Settings of commands that watch a run: section `[monitor]` of `rollq.toml`."""

from typing import Any

from pydantic import Field, field_validator

from rollq.buffer.rules.settings import Settings


class MonitorSettings(Settings):
    """A command that `rollq metrics` and `rollq up` run when the state of the diagnosis changes."""

    on_change: tuple[str, ...] = Field(
        default=(), description="the program and its arguments; it reads the change as JSON from its standard input"
    )
    on_change_after_s: float = Field(
        default=60, ge=0, description="how long a new state must last before it counts, in seconds"
    )

    @field_validator("on_change", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(
                'give a list: the program, and then each of its arguments, as in ["curl", "--data", "@-", '
                '"https://example.org/hook"]; no shell is used'
            )
        return value

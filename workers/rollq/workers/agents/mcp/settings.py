"""Settings of an MCP server, in the table of a tool."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings

SCHEMES: Final = ("http://", "https://")


class McpOptions(Settings):
    """The part of a tool's settings that concerns MCP servers."""

    mcp: str | None = Field(
        default=None, description="URL of an MCP server, or the command that starts one; the model gets all its tools"
    )
    only: tuple[str, ...] = Field(default=(), description="tools of the MCP server for the model; default: all")
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="headers of requests to the URL, each with the name of the environment variable that has its value",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="variables of the command, which gets PATH and the like of the worker's"
    )
    folder: Path | None = Field(
        default=None, description="folder in which the command starts; default: the folder of rollq.toml"
    )
    stateful: bool | None = Field(
        default=None,
        description="each sample has a session of the URL, or a process of the command, and starts again if it is "
        "interrupted; false: all samples of a worker share one. Default: true for a URL, false for a command",
    )
    start_timeout_s: float = Field(
        default=60.0, gt=0, description="longest time for the MCP server or a session to start, in seconds"
    )

    @model_validator(mode="after")
    def _check(self) -> "McpOptions":
        given = self.model_fields_set
        if self.mcp is None:
            if extra := given & (McpOptions.model_fields.keys() - {"mcp"}):
                raise ValueError(f"{min(extra)} is for an MCP server: set mcp as well, or leave it out")
            return self
        if extra := given & {"function", "options"}:
            raise ValueError(f"mcp and {min(extra)} exclude each other: leave one of them out")
        if self.mcp_url is not None:
            _check_url(self.mcp_url)
            if extra := given & {"env", "folder"}:
                raise ValueError(f"{min(extra)} is for the command of an MCP server, and mcp is a URL: leave it out")
            return self
        if not self.mcp_command:
            raise ValueError("mcp is empty: give the URL of an MCP server, or the command that starts one")
        if "headers" in given:
            raise ValueError("headers are for the URL of an MCP server, and mcp is a command: leave them out")
        return self

    @property
    def mcp_url(self) -> str | None:
        """The server's URL, if it has one."""
        return self.mcp if self.mcp is not None and self.mcp.startswith(SCHEMES) else None

    @property
    def mcp_command(self) -> list[str]:
        """The server's program and its arguments. Raises `ValueError` for an unclosed quote."""
        return shlex.split(self.mcp or "")

    @property
    def is_shared(self) -> bool:
        """Whether all of a worker's samples share one connection."""
        return not (self.mcp_url is not None if self.stateful is None else self.stateful)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("mcp is a URL without a host: write http://HOST:PORT/mcp")
    if parts.username is not None or parts.password is not None:
        raise ValueError("mcp is a URL with a password: give it as a header instead, by the name of a variable")


def header_values(variables: Mapping[str, str]) -> dict[str, str]:
    """The headers with values from the environment. Raises `ConfigError` for a variable that is not set."""
    for header, variable in variables.items():
        if not os.environ.get(variable):
            raise ConfigError(f"headers.{header}: the environment variable {variable} is not set")
    return {header: os.environ[variable] for header, variable in variables.items()}

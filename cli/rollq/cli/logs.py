"""Logging for every role, on stderr: plain text, or one line of JSON per record."""

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Literal

import click
import orjson

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the traceback as `error` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def set_up_logs(level: str, log_format: LogFormat) -> None:
    """Send rollq's logs at `level` and above, and other packages' warnings and errors, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rollq").setLevel(level.upper())


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--log-level` and `--log-format`, which take effect before the command runs."""

    @click.option(
        "--log-level",
        type=click.Choice(LEVELS, case_sensitive=False),
        default="info",
        show_default=True,
        help="Lowest severity that is logged.",
    )
    @click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Format of log lines on stderr.",
    )
    @wraps(command)
    def with_logs(*args: Any, log_level: str, log_format: LogFormat, **options: Any) -> None:
        set_up_logs(log_level, log_format)
        command(*args, **options)

    return with_logs


def log_arguments() -> list[str]:
    """The running command's options `--log-level` and `--log-format`, for a process that it starts."""
    given = click.get_current_context().params
    return ["--log-level", given["log_level"], "--log-format", given["log_format"]]

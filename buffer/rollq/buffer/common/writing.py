"""Explains why something cannot be written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollq.buffer.errors import ConfigError, RollqError


@contextmanager
def writing_to(what: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `ConfigError` that names `path`, and in `what`, the option or setting that
    has it."""
    try:
        yield
    except RollqError:  # a lost server is an `OSError` too
        raise
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r}: cannot be written: {error.strerror or error}") from error

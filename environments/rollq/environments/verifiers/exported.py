"""A task set's rows, written by a process of the other Python."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.environments.row_processes import row_process
from rollq.environments.verifiers.other_python import command, variables


def written(
    what: str, asked: Mapping[str, Any], python: str, named: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """The objects that a runner writes with the option `what`; closing the iterator ends the process. Raises
    `ConfigError` with the runner's error."""
    with row_process(command(python, what), variables(named), exact_json.dumps(asked) + b"\n") as running:
        yield from running.rows()
        if error := running.error():
            raise ConfigError(error)

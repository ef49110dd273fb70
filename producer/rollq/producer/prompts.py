"""Prompts at rest: a JSONL file read lazily, one row at a time, by an index of line offsets.

Invariant: row numbers depend only on the file's bytes, so that every producer that reads the same file sees the same
rows. The sampler's order relies on it. Blank lines are no rows.

How a row becomes a `Prompt`:

field of the row    becomes
`prompt_field`      `content`: a text, or a list of chat messages (`{"role": ..., "content": ...}`)
`messages`          `content`, when the row has no `prompt_field`
`answer_field`      `answer`, any JSON value; with `answer_field = ""` prompts have no answer
`prompt_ids`        `ids`, optional token ids that win over the text
anything else       `metadata`
"""

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import orjson
from tqdm import tqdm

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.schema import Prompt
from rollq.buffer.settings import TaskSettings

MAX_LINE_BYTES = 10 * 2**20
PROGRESS_BYTES = 256 * 2**20  # files below are indexed faster than a reader could follow a bar
_CHUNK_BYTES = 8 * 2**20
_BOM = b"\xef\xbb\xbf"
_MAX_TOKEN_ID = 2**31 - 1


class PromptFile:
    """The prompts of one task. The constructor touches no file; entering it opens and indexes (`ConfigError`)."""

    def __init__(self, task: TaskSettings) -> None:
        self.path = task.prompts
        self._fields = (task.prompt_field, task.answer_field)
        self._file: BinaryIO | None = None
        self._bounds: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._lines: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"prompts file {str(self.path)!r} cannot be read: {error.strerror}") from error
        try:
            self._bounds = line_bounds(self._file, self.path.name)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"prompts file {str(self.path)!r} cannot be read: {error.strerror}") from error
        self._lines = np.flatnonzero(np.diff(self._bounds) > 1)
        if not len(self._lines):
            self._file.close()
            raise ConfigError(f"prompts file {str(self.path)!r} is empty; one JSON object per line is expected")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def rows(self) -> int:
        """Number of lines that are not blank."""
        return len(self._lines)

    def prompt(self, row: int) -> Prompt:
        """Prompt of row `row` (from 0). Raises `InvalidPrompt` with the file and the line number (from 1)."""
        line = int(self._lines[row])
        try:
            return parse_prompt(self._read(line), *self._fields)
        except ValueError as error:
            raise InvalidPrompt(f"{self.path}:{line + 1}: {error}") from error

    def _read(self, line: int) -> bytes:
        start, end = int(self._bounds[line]), int(self._bounds[line + 1]) - 1
        if end - start > MAX_LINE_BYTES:
            raise ValueError(f"{end - start} bytes in one line; at most {MAX_LINE_BYTES} are allowed")
        if self._file is None:
            raise RuntimeError("PromptFile is used outside of its with block")
        data = os.pread(self._file.fileno(), end - start, start)
        return data.removeprefix(_BOM) if line == 0 else data


def line_bounds(file: BinaryIO, name: str) -> npt.NDArray[np.int64]:
    """Offset of the start of each line, then of the end of the file: int64 [lines + 1].

    A last line without a newline counts as if it had one. Memory: 8 bytes a line.
    """
    size = os.fstat(file.fileno()).st_size
    parts = [np.zeros(1, np.int64)]
    offset = 0
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"index {name}", disable=size < PROGRESS_BYTES) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            parts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
            offset += len(chunk)
            bar.update(len(chunk))
    bounds = np.concatenate(parts)
    return bounds if bounds[-1] == offset else np.append(bounds, offset + 1)


def parse_prompt(line: bytes, prompt_field: str, answer_field: str) -> Prompt:
    """One JSONL line as a `Prompt`, by the mapping above. Raises `ValueError` that says what is wrong with it."""
    row = _json_object(line)
    field = "messages" if prompt_field not in row and "messages" in row else prompt_field
    if field not in row:
        raise ValueError(f"no field {prompt_field!r} (prompt_field), nor 'messages'; the row has {_names(row)}")
    if answer_field and answer_field not in row:
        raise ValueError(
            f"no field {answer_field!r} (answer_field); the row has {_names(row)}; "
            'set answer_field = "" when prompts have no answer'
        )
    used = {field, answer_field, "prompt_ids"}
    return Prompt(
        content=_content(field, row[field]),
        answer=row[answer_field] if answer_field else None,
        ids=_token_ids(row.get("prompt_ids")),
        metadata={key: value for key, value in row.items() if key not in used},
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is expected, not {type(row).__name__}")
    return row


def _content(field: str, value: Any) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"field {field!r} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} must be a text or a list of messages, not {_shown(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{field}[{number}] must be an object with a 'role', not {_shown(message)}")
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise ValueError(
                f"{field}[{number}].content must be a text or a list, not {_shown(message.get('content'))}"
            )
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError(f"field 'prompt_ids' must be a list of token ids, not {_shown(value)}")
    for token in value:
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            raise ValueError(f"field 'prompt_ids' holds {_shown(token)}, which is no token id")
    return tuple(value)


def _names(row: Mapping[str, Any]) -> str:
    return _shown(sorted(row)[:20])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

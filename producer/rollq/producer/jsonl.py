"""A JSON Lines file as a table, read lazily, one row at a time, through an index of line offsets.

Blank lines do not count as rows.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from rollq.buffer import exact_json
from rollq.buffer.errors import ConfigError

MAX_LINE_BYTES = 10 * 2**20
PROGRESS_BYTES = 256 * 2**20  # smaller files are indexed too fast for a progress bar
_CHUNK_BYTES = 8 * 2**20
_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The rows of an open file. Takes 8 bytes of memory per line and 8 per row."""

    def __init__(self, path: Path, file: BinaryIO, bounds: npt.NDArray[np.int64], fingerprint: str) -> None:
        """Use `open`. `bounds` and `fingerprint` are the result of `index`."""
        self.fingerprint = fingerprint
        self._path = path
        self._file = file
        self._bounds = bounds
        self._lines = np.flatnonzero(np.diff(bounds) > 1)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and index a file. Raises `OSError`, and `ConfigError` for a file without rows."""
        file = path.open("rb")
        try:
            table = cls(path, file, *index(file, path.name))
            if not table.rows:
                raise ConfigError(f"prompts file {str(path)!r} is empty; one JSON object per line is expected")
        except BaseException:
            file.close()
            raise
        return table

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def rows(self) -> int:
        """Number of lines that are not blank."""
        return len(self._lines)

    def place(self, row: int) -> str:
        """The location of a row for error messages: the file and the line (from 1)."""
        return f"{self._path}:{int(self._lines[row]) + 1}"

    def read(self, row: int) -> dict[str, Any]:
        """Return the object in row `row` (from 0). Raises `ValueError` if the line is not a JSON object."""
        line = int(self._lines[row])
        start, end = int(self._bounds[line]), int(self._bounds[line + 1]) - 1
        if end - start > MAX_LINE_BYTES:
            raise ValueError(f"{end - start} bytes in one line; at most {MAX_LINE_BYTES} are allowed")
        data = os.pread(self._file.fileno(), end - start, start)
        return json_object(data.removeprefix(_BOM) if line == 0 else data)


def index(file: BinaryIO, name: str) -> tuple[npt.NDArray[np.int64], str]:
    """Return the offset of each line's start, then of the file's end, int64 [lines + 1]; and the SHA-256 of the file.

    A last line without a newline counts as if it had one. Takes 8 bytes of memory per line.
    """
    size = os.fstat(file.fileno()).st_size
    parts = [np.zeros(1, np.int64)]
    offset, digest = 0, hashlib.sha256()
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"index {name}", disable=size < PROGRESS_BYTES) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            parts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
            digest.update(chunk)
            offset += len(chunk)
            bar.update(len(chunk))
    bounds = np.concatenate(parts)
    return bounds if bounds[-1] == offset else np.append(bounds, offset + 1), digest.hexdigest()


def json_object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises `ValueError` with the reason if it is not one."""
    try:
        row = exact_json.loads_as_written(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is expected, not {type(row).__name__}")
    return row

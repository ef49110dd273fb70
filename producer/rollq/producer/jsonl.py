"""A JSON Lines file as a table, read lazily, one row at a time, through an index of line offsets.

Blank lines do not count as rows. Files of another kind are refused with an error that names the kind.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError, RunMismatch

MAX_LINE_BYTES = 10 * 2**20
PROGRESS_BYTES = 256 * 2**20  # smaller files are indexed too fast for a progress bar
_CHUNK_BYTES = 8 * 2**20
_BOM = b"\xef\xbb\xbf"
BLANK_BYTES = 16
"""Lines of white space up to this length are blank."""
HEAD_BYTES = 4096
OTHER_KINDS = (
    (b"\x1f\x8b", "compressed with gzip", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it with unzstd"),
    (b"BZh", "compressed with bzip2", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it with unxz"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"PAR1", "a Parquet file", "give it a name that ends with .parquet"),
    (b"ARROW1", "an Arrow file", "give it a name that ends with .arrow"),
    (b"\xff\xfe", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
"""A file's first bytes, the kind of file that they mark, and the remedy."""


class JsonLines:
    """The rows of an open file. Takes 8 bytes of memory per line and 8 per row."""

    def __init__(self, path: Path, file: BinaryIO, bounds: npt.NDArray[np.int64], fingerprint: str) -> None:
        """Use `open`. `bounds` and `fingerprint` are the result of `index`."""
        self.fingerprint = fingerprint
        self._path = path
        self._file = file
        self._bounds = bounds
        self._state = _state_of(file)
        self._lines = _lines_that_are_not_blank(file, bounds)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and index a file. Raises `OSError`, and `ConfigError` for a file without rows."""
        file = path.open("rb")
        try:
            if problem := kind_problem(path, os.pread(file.fileno(), HEAD_BYTES, 0)):
                raise ConfigError(f"prompts = {str(path)!r} {problem}")
            table = cls(path, file, *index(file, path.name))
            if not table.rows:
                raise ConfigError(f"prompts = {str(path)!r} is empty; one JSON object per line is expected")
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

    @property
    def fills_gaps(self) -> bool:
        """False: every null is from the file."""
        return False

    def place(self, row: int) -> str:
        """The location of a row for error messages: the file and the line (from 1)."""
        return f"{self._path}:{int(self._lines[row]) + 1}"

    def read(self, row: int) -> dict[str, Any]:
        """Return the object in row `row` (from 0). Raises `ValueError` if the line is not a JSON object, and
        `RunMismatch` if the file was changed after it was opened."""
        return json_object(self._line(int(self._lines[row])))

    def not_utf8(self, count: int) -> list[str]:
        """An error for each of the first `count` rows that is not UTF-8."""
        found = []
        for row in range(min(self.rows, count)):
            try:
                self._line(int(self._lines[row])).decode()
            except UnicodeDecodeError as error:
                found.append(f"{self.place(row)}: not UTF-8 at byte {error.start} of the line")
            except ValueError:  # too long: reported when the row is reached
                continue
        return found

    def _line(self, line: int) -> bytes:
        start, end = int(self._bounds[line]), int(self._bounds[line + 1]) - 1
        if end - start > MAX_LINE_BYTES:
            raise ValueError(f"{end - start} bytes in one line; at most {MAX_LINE_BYTES} are allowed")
        data = os.pread(self._file.fileno(), end - start, start)
        self._check_unchanged()
        return data.removeprefix(_BOM) if line == 0 else data

    def _check_unchanged(self) -> None:
        """The lines of a changed file may begin elsewhere, and the order of prompts depends on its content."""
        if (state := _state_of(self._file)) == self._state:
            return
        if _digest_of(self._file) != self.fingerprint:
            raise RunMismatch(
                f"prompts = {str(self._path)!r} was changed while it was in use: change it back, or start again; to "
                "replace prompts, write another file and rename it"
            )
        self._state = state


def _state_of(file: BinaryIO) -> tuple[int, int]:
    """The size and the time of the last change (ns): if they stay, so does the content."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _digest_of(file: BinaryIO) -> str:
    """The SHA-256 of a file. Other threads may read it at the same time."""
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(file.fileno(), _CHUNK_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def kind_problem(path: Path, head: bytes) -> str | None:
    """Why a file that begins with `head` is not JSON Lines, and the remedy; None if it may be JSON Lines."""
    for magic, kind, remedy in OTHER_KINDS:
        if head.startswith(magic):
            return f"is {kind}: {remedy}"
    if path.suffix.lower() in (".csv", ".tsv"):
        return f"is a table of {path.suffix[1:].upper()}: convert it, with datasets.Dataset.from_csv(...).to_json(...)"
    text = head.removeprefix(_BOM).lstrip()
    first, newline, _ = text.partition(b"\n")
    if text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"", b"]"):
        return f"is one JSON array: write one JSON object per line, with jq -c '.[]' {path.name} > rows.jsonl"
    if newline and first.strip() == b"{":
        return f"has JSON objects over several lines: write one per line, with jq -c . {path.name} > rows.jsonl"
    return None


def _lines_that_are_not_blank(file: BinaryIO, bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of lines with more than white space. Long lines are not checked."""
    lengths = np.diff(bounds)
    short = np.flatnonzero((lengths > 1) & (lengths <= BLANK_BYTES))
    blank = [line for line in short if not os.pread(file.fileno(), int(lengths[line]), int(bounds[line])).strip()]
    is_row = lengths > 1
    is_row[blank] = False
    return np.flatnonzero(is_row)


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

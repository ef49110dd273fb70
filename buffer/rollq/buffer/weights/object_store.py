"""Weights in an S3-compatible object store (see `rollq.buffer.common.s3`). Needs `rollq[s3]`."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rollq.buffer.common.s3 import open_bucket
from rollq.buffer.errors import WeightsError

log = logging.getLogger(__name__)

REQUEST_BYTES = 16 << 20
"""Bytes in one upload request."""
CONNECTIONS = 4
"""Concurrent requests per upload."""
STREAM_BYTES = 1 << 20
PROGRESS_S = 10.0


class ObjectStore:
    """A bucket's objects below a prefix. Every method raises `WeightsError` if the store fails."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` for a URL that is not `s3://bucket/prefix`, a wrong endpoint, and without obstore."""
        self._url = url.rstrip("/")
        self._store = open_bucket(url, {"timeout": "120s"}, what="weights")
        # the limits are for a whole download and for one read
        self._reader = open_bucket(url, {"timeout": "12h", "read_timeout": "60s"}, what="weights")

    def uri(self, name: str) -> str:
        """The URI of an object, or of several objects whose names begin with `name/`."""
        return f"{self._url}/{name}"

    def upload(self, name: str, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """Store an object of `size` bytes as its pieces arrive, in several concurrent requests. The object appears
        complete or not at all."""
        import obstore

        progress = _Progress(f"uploading {self.uri(name)}", size)
        with _explained(self.uri(name)):
            obstore.put(
                self._store, name, progress.through(pieces), chunk_size=REQUEST_BYTES, max_concurrency=CONNECTIONS
            )

    def download(self, name: str, path: Path, size: int) -> None:
        """Write an object of `size` bytes to a file as it arrives."""
        import obstore

        progress, done = _Progress(f"downloading {self.uri(name)}", size), 0
        with _explained(self.uri(name)), path.open("wb") as file:
            stream = obstore.get(self._reader, name).stream(min_chunk_size=STREAM_BYTES)
            for piece in progress.through(memoryview(piece) for piece in stream):
                done += file.write(piece)
                if done > size:
                    break
        if done != size:
            raise WeightsError(f"weights {self.uri(name)!r} do not have {size} bytes; publish them again")

    def names(self, folder: str) -> list[str]:
        """The names of all objects that begin with `folder/`, oldest first."""
        import obstore

        with _explained(self.uri(folder)):
            entries = [entry for page in obstore.list(self._store, folder) for entry in page]
        return [entry["path"] for entry in sorted(entries, key=lambda entry: entry["last_modified"])]

    def remove(self, names: list[str]) -> None:
        """Remove objects; missing ones are ignored."""
        import obstore

        with _explained(self._url):
            obstore.delete(self._store, names)


class _Progress:
    """Logs a transfer's progress every `PROGRESS_S` seconds."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._done = 0
        self._logged_s = monotonic()

    def through(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces, counting them as they are taken."""
        for piece in pieces:
            yield piece
            self._done += len(piece)
            if monotonic() - self._logged_s >= PROGRESS_S:
                self._logged_s = monotonic()
                log.info("%s: %d of %d MiB", self._what, self._done >> 20, self._size >> 20)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn obstore errors into a one-line `WeightsError`; errors from this machine's disk stay `OSError`."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise WeightsError(f"weights {uri!r}: the object or its bucket is not there") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise WeightsError(
            f"weights {uri!r}: the store refuses these credentials (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY): "
            f"{_first_line(error)}"
        ) from error
    except BaseError as error:
        raise WeightsError(
            f"weights {uri!r}: no answer from the store (set AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY): {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

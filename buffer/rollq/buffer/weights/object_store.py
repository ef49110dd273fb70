"""Weights in an S3-compatible object store. The endpoint and the credentials come from the environment, as AWS names
them (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...), and are never sent anywhere else. Needs `rollq[s3]`.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rollq.buffer.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

log = logging.getLogger(__name__)

URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/(?!\.{1,2}(?:/|\Z))[\w.=+@-]+)*)/?")
"""`s3://bucket/prefix`."""
REQUEST_BYTES = 16 << 20
"""Bytes of one request of an upload."""
CONNECTIONS = 4
"""Requests of an upload at the same time."""
STREAM_BYTES = 1 << 20
RETRIES, RETRY_S = 4, 60.0
PROGRESS_S = 10.0


class ObjectStore:
    """The objects of a bucket below a prefix. Every method raises `WeightsError` for a store that cannot do it."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` for a URL that is not `s3://bucket/prefix`, a wrong endpoint, and without obstore."""
        if (found := URL.fullmatch(url)) is None:
            raise ConfigError(f"{url!r} is not the URL of a bucket and a prefix, such as s3://bucket/prefix")
        self._url = url.rstrip("/")
        bucket, prefix = found[1], found[2].strip("/")
        self._store = _connect(bucket, prefix, {"timeout": "120s"})
        self._reader = _connect(
            bucket, prefix, {"timeout": "12h", "read_timeout": "60s"}
        )  # of a whole download, of a read

    def uri(self, name: str) -> str:
        """The URI of an object, or of several whose names begin with `name/`."""
        return f"{self._url}/{name}"

    def upload(self, name: str, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """Store an object of `size` bytes, as it comes, in several requests at a time. It appears complete or not."""
        import obstore

        progress = _Progress(f"uploading {self.uri(name)}", size)
        with _explained(self.uri(name)):
            obstore.put(
                self._store,
                name,
                progress.through(pieces),
                chunk_size=REQUEST_BYTES,
                max_concurrency=CONNECTIONS,
            )

    def download(self, name: str, path: Path, size: int) -> None:
        """Write an object of `size` bytes to a file, as it comes."""
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
            found = [entry for page in obstore.list(self._store, folder) for entry in page]
        return [entry["path"] for entry in sorted(found, key=lambda entry: entry["last_modified"])]

    def remove(self, names: list[str]) -> None:
        """Remove objects; those that are gone do not matter."""
        import obstore

        with _explained(self._url):
            obstore.delete(self._store, names)


class _Progress:
    """Logs how far a transfer has come, every `PROGRESS_S` seconds."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._done = 0
        self._logged_s = monotonic()

    def through(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The pieces, counted as they are taken."""
        for piece in pieces:
            yield piece
            self._done += len(piece)
            if monotonic() - self._logged_s >= PROGRESS_S:
                self._logged_s = monotonic()
                log.info("%s: %d of %d MiB", self._what, self._done >> 20, self._size >> 20)


def _connect(bucket: str, prefix: str, timeouts: "ClientConfig") -> "S3Store":
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(f"weights in an object store need obstore ({error}): pip install 'rollq[s3]'") from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"AWS_ENDPOINT_URL is {endpoint!r}: it must begin with http:// or https://")
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={**timeouts, "allow_http": endpoint.startswith("http://"), "connect_timeout": "10s"},
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
    )


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn the errors of obstore into a `WeightsError` of one line; those of this machine's disk stay `OSError`."""
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

"""Reads the images that prompts refer to.

For each group, Redis holds references: a file's URL and checksum, or a small file itself. The worker reads the files
for its engine, and the trainer for its model. rollq never deletes these files; keep them for as long as groups that
name them may be trained or replayed.
"""

import base64
import binascii
import hashlib
import socket
import threading
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from rollq.buffer.errors import ImageError
from rollq.buffer.values.rollouts import ImageRef

MOST_IMAGE_BYTES: Final = 64 << 20
"""The size of the largest file to read, in bytes."""
INLINE: Final = "data:;base64,"
"""The prefix of a URL that holds the file itself, in base64."""
TIMEOUT_S: Final = 30
"""How long a server may be silent, in seconds."""
DOWNLOAD_S: Final = 120.0
"""How long a file may take, with all redirects, in seconds."""


def read_image(image: ImageRef) -> bytes:
    """Read an image's file, and compare its checksum.

    Raises `ImageError` if the file cannot be read, is larger than `MOST_IMAGE_BYTES`, or has another checksum.
    """
    data = read_file(image.url)
    if (sha256 := digest_of_image(data)) != image.sha256:
        raise ImageError(
            f"image {_short(image.url)!r}: sha256 is {sha256[:12]}..., the prompt was made with {image.sha256[:12]}..."
        )
    return data


def read_file(url: str) -> bytes:
    """Read the file at a URL. Raises `ImageError` if it is unreadable, empty, or larger than `MOST_IMAGE_BYTES`."""
    try:
        data = _read(url)
    except (OSError, ValueError, HTTPException) as error:  # a URL or base64 that is malformed is a ValueError
        raise ImageError(f"image {_short(url)!r} cannot be read: {error}") from error
    if not data:
        raise ImageError(f"image {_short(url)!r} is empty")
    if len(data) > MOST_IMAGE_BYTES:
        raise ImageError(f"image {_short(url)!r} is larger than {MOST_IMAGE_BYTES >> 20} MiB")
    return data


def inline_image(data: bytes) -> ImageRef:
    """A reference that holds the file itself."""
    return ImageRef(INLINE + base64.b64encode(data).decode(), digest_of_image(data))


def digest_of_image(data: bytes) -> str:
    """A file's sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _read(url: str) -> bytes:
    """Read a file, up to one byte more than `MOST_IMAGE_BYTES`. Raises `OSError` and `ValueError`."""
    if url.startswith(INLINE):
        try:
            return base64.b64decode(url[len(INLINE) :], validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if not path.is_file() and path.exists():  # a pipe or a device would never end
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            return file.read(MOST_IMAGE_BYTES + 1)
    if parts.scheme != "https":
        raise ValueError("only file:///, https:// and data:;base64, can be read")
    with _Deadline(DOWNLOAD_S) as deadline:
        try:
            with build_opener(_OnlyHttps, _HttpsUntil(deadline)).open(url, timeout=TIMEOUT_S) as response:
                data: bytes = response.read(MOST_IMAGE_BYTES + 1)
        except (OSError, ValueError, HTTPException):
            deadline.check()
            raise
        deadline.check()
        return data


class _Deadline:
    """Cuts connections off at a deadline, since a server that sends a byte now and then is never silent."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._is_over = limit_s, False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(limit_s, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def check(self) -> None:
        """Raise `TimeoutError` once the time is over."""
        if self._is_over:
            raise TimeoutError(f"it took longer than {self._limit_s:g} s")

    def add(self, connected: socket.socket) -> None:
        """Cut this connection off, too."""
        self._sockets.append(connected)
        if self._is_over:
            _shut(connected)

    def _cut(self) -> None:
        self._is_over = True
        for socket_ in self._sockets:
            _shut(socket_)


def _shut(connected: socket.socket) -> None:
    """End another thread's read. This bypasses TLS, which would wait for the server."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class _HttpsUntil(HTTPSHandler):
    """Opens connections that a deadline cuts off."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: Request) -> Any:
        deadline = self._deadline

        class Connection(HTTPSConnection):
            def connect(self) -> None:
                deadline.check()
                super().connect()
                deadline.add(self.sock)

        return self.do_open(Connection, req)


class _OnlyHttps(HTTPRedirectHandler):
    """Follows only redirects to https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://"):
            raise ValueError(f"it redirects to {newurl!r}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _short(url: str) -> str:
    return url if len(url) < 200 else f"{url[:60]}..."

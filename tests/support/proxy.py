"""A TCP proxy in front of a server, which cuts connections when a test says so."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 16


class Proxy:
    """Forwards to `port` of this machine until the `with` block ends. `cut_at` cuts a connection at a word."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._words: list[bytes] = []
        self.cuts = 0

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def cut_at(self, word: bytes, *, times: int = 1) -> None:
        """Cut the next `times` connections over which a client sends `word`, which does not reach the server."""
        self._words += [word] * times

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close(self._listener, *self._sockets)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either end was closed
            while piece := source.recv(PIECE_BYTES):
                if self._is_cut(piece):
                    break
                sink.sendall(piece)
        _close(source, sink)

    def _is_cut(self, piece: bytes) -> bool:
        word = next((word for word in self._words if word in piece), None)
        if word is None:
            return False
        self._words.remove(word)
        self.cuts += 1
        return True


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

"""A TCP proxy in front of a Redis server. It reads commands, and breaks the ones that a test chooses.

Each connection is served in lockstep: one command goes to the server, and its reply comes back, before the next one is
read. So a fault hits exactly one command, also in the middle of a pipeline.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import BinaryIO, Self

PIECE_BYTES = 1 << 16
COPY_TIMEOUT_S = 5.0
CHECK_S = 0.02


class Fate(StrEnum):
    """What happens to one command."""

    PASS = "pass"  # it runs, and its reply arrives
    LOSE = "lose"  # the connection breaks before the server gets it
    DROP = "drop"  # it runs, and the connection breaks before its reply arrives
    COPY = "copy"  # like DROP, and the server gets the same command once more, later and over another connection


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of a command. `delay_s` is the delay before it is forwarded, or for `COPY`, before the copy is sent.
    `then` is called once the server has run the command, before its client gets the reply."""

    fate: Fate = Fate.PASS
    delay_s: float = 0.0
    then: Callable[[], object] = lambda: None


PASS = Verdict()
Judge = Callable[[bytes], Verdict]
"""Decides the fate of a command from its bytes, as the client sent them."""


class Proxy:
    """Forwards to `port` of this machine until the `with` block ends. `judge` decides the fate of each command."""

    def __init__(self, port: int, judge: Judge = lambda _: PASS) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._words: list[bytes] = []
        self._judge = judge
        self._held_until_s = 0.0
        self.cuts = 0
        self.copies = 0
        self.broken = 0
        """Commands whose fate was not to pass, once that fate is complete."""

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def cut_at(self, word: bytes, *, times: int = 1) -> None:
        """Cut the next `times` connections over which a client sends `word`, which does not reach the server."""
        self._words += [word] * times

    def hold(self, for_s: float) -> None:
        """Let nothing through in either direction for a while, as if the network were partitioned."""
        self._held_until_s = time.monotonic() + for_s

    def redirect(self, port: int) -> None:
        """Forward new connections to another port, and break the others."""
        self._target = ("127.0.0.1", port)
        _close(*self._sockets)

    def close(self) -> None:
        """Break every connection, and take no more: for its clients the server is gone."""
        _close(self._listener, *self._sockets)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._sockets.add(client)
        server: socket.socket | None = None
        with suppress(OSError):  # either end was closed, or the server is away
            server = socket.create_connection(self._target)
            self._sockets.add(server)
            self._exchange(client, server)
        for each in (client, server):
            if each is not None:
                _close(each)
                self._sockets.discard(each)

    def _exchange(self, client: socket.socket, server: socket.socket) -> None:
        commands, replies = client.makefile("rb"), server.makefile("rb")
        while command := read_command(commands):
            verdict = self._verdict(command)
            if verdict.fate is not Fate.PASS:
                self._break(command, verdict, server, replies)
                self.broken += 1
                break
            time.sleep(verdict.delay_s)
            self._wait_out_hold()
            server.sendall(command)
            if name_of(command) in (b"SUBSCRIBE", b"PSUBSCRIBE"):
                self._copy_both_ways(client, server, commands, replies)
                break
            reply = read_reply(replies)
            if not reply:
                break
            verdict.then()
            self._wait_out_hold()
            client.sendall(reply)

    def _break(self, command: bytes, verdict: Verdict, server: socket.socket, replies: BinaryIO) -> None:
        """Lose a command, or run it and lose its reply. The connection ends in both cases."""
        if verdict.fate is not Fate.LOSE:
            self._wait_out_hold()
            server.sendall(command)
            read_reply(replies)
            verdict.then()
        if verdict.fate is Fate.COPY:
            threading.Thread(target=self._copy, args=(command, verdict.delay_s), daemon=True).start()

    def _verdict(self, command: bytes) -> Verdict:
        word = next((word for word in self._words if word in command), None)
        if word is None:
            return self._judge(command)
        self._words.remove(word)
        self.cuts += 1
        return Verdict(Fate.LOSE)

    def _wait_out_hold(self) -> None:
        while time.monotonic() < self._held_until_s:
            time.sleep(CHECK_S)

    def _copy(self, command: bytes, delay_s: float) -> None:
        time.sleep(delay_s)
        with suppress(OSError), socket.create_connection(self._target, timeout=COPY_TIMEOUT_S) as server:
            server.sendall(command)
            read_reply(server.makefile("rb"))
            self.copies += 1

    def _copy_both_ways(
        self, client: socket.socket, server: socket.socket, commands: BinaryIO, replies: BinaryIO
    ) -> None:
        """Forward without looking, for subscribers, who get messages that they did not ask for."""
        back = threading.Thread(target=self._forward, args=(replies, client, server), daemon=True)
        back.start()
        self._forward(commands, server, client)
        back.join()

    def _forward(self, source: BinaryIO, sink: socket.socket, other: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while piece := source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                self._wait_out_hold()
                sink.sendall(piece)
        _close(sink, other)


def read_command(stream: BinaryIO) -> bytes:
    """The next command of a client, as bytes; empty at the end of the stream, also within a command."""
    head = stream.readline()
    if not head.startswith(b"*"):
        return head
    parts = [head]
    for _ in range(int(head[1:])):
        size = stream.readline()
        if not size:
            return b""
        parts += [size, stream.read(int(size[1:]) + 2)]
    return b"".join(parts) if parts[-1].endswith(b"\r\n") else b""


def read_reply(stream: BinaryIO) -> bytes:
    """The next whole reply of a server, as bytes; empty at the end of the stream."""
    head = stream.readline()
    kind, size = head[:1], head[1:].strip()
    if kind in (b"$", b"=", b"!") and not size.startswith(b"-"):
        return head + stream.read(int(size) + 2)
    if kind in (b"*", b"~", b">", b"%") and not size.startswith(b"-"):
        count = int(size) * (2 if kind == b"%" else 1)
        return head + b"".join([read_reply(stream) for _ in range(count)])
    return head


def name_of(command: bytes) -> bytes:
    """The command's name in upper case: FCALL, HGET, ..."""
    return command.split(b"\r\n", 3)[2].upper() if command.startswith(b"*") else command[:16].strip().upper()


def function_of(command: bytes) -> str:
    """The rollq function that a command calls, without the library's name; empty for other commands."""
    if not name_of(command).startswith(b"FCALL"):
        return ""
    return command.split(b"\r\n", 5)[4].decode().split("_", 2)[2]  # rollq_<version>_<name>


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

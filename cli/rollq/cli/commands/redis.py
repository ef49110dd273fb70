"""`rollq redis`: runs the embedded server in the foreground."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.cli.logs import log_options
from rollq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from rollq.buffer.store.embedded_server import EmbeddedServer

log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("rollq-redis"),
    show_default=True,
    help="Folder of the data; created if needed, kept for the next start.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=6379, show_default=True, help="TCP port.")
@click.option(
    "--bind",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but loopback needs a password or --acl.",
)
@click.option("--password-env", metavar="NAME", help="Environment variable that holds the server's password.")
@click.option("--acl", type=click.Path(path_type=Path), help="File with the server's users, made by `rollq runs acl`.")
@click.option(
    "--certificates",
    type=click.Path(path_type=Path),
    help="Folder with ca.crt, server.crt and server.key: speak only TLS, with clients that show a certificate.",
)
@click.option(
    "--program",
    type=click.Path(path_type=Path),
    help="Server program, such as /usr/bin/redis-server; the default one has no TLS.",
)
@click.option(
    "--cluster",
    "primaries",
    type=click.IntRange(1),
    metavar="N",
    help="Run a cluster of N primaries and a replica of each instead, on the ports from --port on.",
)
@log_options
def redis(
    directory: Path,
    port: int,
    bind: str,
    password_env: str | None,
    acl: Path | None,
    certificates: Path | None,
    program: Path | None,
    primaries: int | None,
) -> None:
    """Run a Redis-compatible server, or a cluster, on this machine until Ctrl-C, with its data safe on disk.

    \b
    Example:
      rollq redis --dir data
      rollq redis --dir data --cluster 3
      ROLLQ_REDIS_PASSWORD=... rollq redis --bind 0.0.0.0 --password-env ROLLQ_REDIS_PASSWORD
      rollq redis --bind 10.0.0.1 --acl rollq.acl --certificates certificates --program /usr/bin/redis-server
    """
    from rollq.buffer.common.user_functions import inside
    from rollq.buffer.store.embedded_cluster import REPLICAS, EmbeddedCluster
    from rollq.buffer.store.embedded_server import EmbeddedServer, memory_limit

    password = None if password_env is None else _password(password_env)
    stop = stop_on_signals()
    parts: dict[str, Any] = {
        "port": port, "bind": bind, "password": password, "binary": program, "acl": acl, "certificates": certificates,
        "directives": memory_limit(directory, 1 if primaries is None else primaries * (1 + REPLICAS)),
    }  # fmt: skip
    server: EmbeddedServer | EmbeddedCluster
    if primaries is None:
        server = EmbeddedServer(directory, **parts)
    else:
        server = EmbeddedCluster(directory, primaries=primaries, **parts)
    nodes = [server] if isinstance(server, EmbeddedServer) else server.nodes
    with inside("--dir"), server:
        click.echo(f"serving at {server.url}, data in {directory.absolute()}; Ctrl-C stops it")
        _watch(nodes, stop, directory)


def _watch(nodes: "Sequence[EmbeddedServer]", stop: Event, directory: Path) -> None:
    """Log which servers exit, until `stop` is set. Raises `ServerUnavailable` once all have exited."""
    alive = list(nodes)
    while not stop.wait(0.2):
        for dead in [node for node in alive if not node.running]:
            alive.remove(dead)
            log.warning("the server at %s exited by itself; see %r", dead.url, str(dead.log_path))
        if not alive:
            raise ServerUnavailable(f"all servers have stopped; see server.log in {str(directory)!r}")


def _password(variable: str) -> str:
    if not (password := os.environ.get(variable)):
        raise ConfigError(f"--password-env {variable!r}: this environment variable is not set or is empty")
    return password

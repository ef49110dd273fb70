"""The server of `rollq up`: the server that answers at the configured URL, or else an embedded server there."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

from redis.exceptions import InvalidResponse

from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.buffer.store.connection import Patience, check_server, connect, open_client
from rollq.buffer.store.embedded_server import EmbeddedServer, memory_limit
from rollq.buffer.store.redis_url import mask_url, node_urls
from rollq.buffer.store.servers import connect_servers
from rollq.cli.run_location import RunLocation

DEFAULT_PORT = 6379


@contextmanager
def server_at(location: RunLocation, folder: Path) -> Iterator[EmbeddedServer | None]:
    """The embedded server, with its data in `folder`, for the duration of the `with` block; None if a server already
    answers.

    Raises `ServerRefused`, and `ServerUnavailable` if no server answers at the URL and none can be started there.
    """
    if location.queue_url != location.buffer_url:
        connect(location.queue_url, location.password).close()
    place = embedded_place(location.buffer_url)
    try:
        if place is None:
            connect_servers(location.buffer_url, location.password).close()
        elif not _answers(location):
            in_url = urlsplit(location.buffer_url).password
            password = unquote(in_url) if in_url else location.password
            limit = memory_limit(folder)
            with EmbeddedServer(folder, port=place[1], bind=place[0], password=password, directives=limit) as server:
                yield server
            return
    except ServerUnavailable as error:
        if place is not None:
            raise
        hint = "`rollq up` starts a server only at a URL such as redis://127.0.0.1:6379/0"
        raise ServerUnavailable(f"{error}; {hint}") from None
    yield None


@contextmanager
def server_beside(location: RunLocation, folder: Path) -> Iterator[str | None]:
    """The URL of an embedded server at a free port, for the duration of the `with` block; None if a server answers at
    the location. Other roles use the location, so they do not find the embedded server."""
    if embedded_place(location.buffer_url) is None or _answers(location):
        yield None
        return
    with EmbeddedServer(folder, password=location.password, directives=memory_limit(folder)) as server:
        yield server.url


def _answers(location: RunLocation) -> bool:
    """Whether a server answers at once. Raises `ServerRefused` and `ConfigError` for a server that rollq cannot use."""
    with closing(open_client(location.buffer_url, location.password)) as client:
        try:
            check_server(client, Patience(unanswered_s=0.0))
        except ServerUnavailable:
            return False
        except InvalidResponse:
            raise ConfigError(
                f"{mask_url(location.buffer_url)}: another kind of server answers there; stop it, or change the port "
                "in [redis] buffer_url"
            ) from None
    return True


def embedded_place(url: str) -> tuple[str, int] | None:
    """Address and port for an embedded server that clients reach at `url`; None if no such server is possible."""
    if len(node_urls(url)) > 1:
        return None
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in (None, "localhost") else parts.hostname
    try:
        is_here = ip_address(host or "").is_loopback
    except ValueError:
        return None
    if parts.scheme != "redis" or parts.username or not is_here:
        return None
    return str(host), parts.port or DEFAULT_PORT

"""Checks URLs of Redis servers, shows them without secrets, and makes them from clients."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import redis

from rollq.buffer.errors import ConfigError

_HOSTS = re.compile(r"(?P<before>rediss?://(?:[^/?#]*@)?)(?P<hosts>[^/?#]*)(?P<after>.*)", re.DOTALL)
"""A URL's hosts, and the text before and after them."""


def node_urls(url: str) -> list[str]:
    """The URL of every host that `url` names: `redis://a:7000,b:7000/0` names two."""
    parts = _HOSTS.fullmatch(url)
    return [parts["before"] + host + parts["after"] for host in parts["hosts"].split(",")] if parts else [url]


def node_url(url: str, host: str, port: int) -> str:
    """The URL of another node in the cluster at `url`; only host and port differ."""
    parts = _HOSTS.fullmatch(url)
    assert parts is not None
    return f"{parts['before']}{f'[{host}]' if ':' in host else host}:{port}{parts['after']}"


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` names a server: `redis[s]://[user:password@]host[:port][/db]` or `unix://path`.

    Several hosts, separated by commas, name nodes of a cluster.
    """
    urls = node_urls(url)
    for node in urls:
        _check_url(node)
    if len(urls) > 1 and (urlsplit(urls[0]).path not in ("", "/", "/0") or re.search(r"[?&]db=[^0]", url)):
        raise ConfigError(f"server URL {mask_url(url)!r}: a cluster has only database 0")
    if re.search(r"://[^/?#]*@[^/?#]*,[^/?#]*@", url):
        raise ConfigError(f"server URL {mask_url(url)!r}: user and password come once, before the first host")


def _check_url(url: str) -> None:
    shown = mask_url(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"server URL {shown!r}: the port must be 1 to 65535, and IPv6 hosts are in []") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"server URL {shown!r}: must begin with redis://, rediss:// or unix://")
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/"):
            raise ConfigError(f"server URL {shown!r}: needs an absolute path, as in unix:///run/valkey.sock")
        return
    if not parts.hostname or port == 0:
        raise ConfigError(f"server URL {shown!r}: needs a host and a port from 1, as in redis://localhost:6379/0")
    if parts.path not in ("", "/") and not re.fullmatch(r"/\d{1,5}", parts.path):
        raise ConfigError(f"server URL {shown!r}: what follows the host must be the number of a database, as in /0")


TLS_OPTIONS: Mapping[str, str] = {"ssl_ca_certs": "cacert", "ssl_certfile": "cert", "ssl_keyfile": "key"}
"""The driver's options for TLS files, as written in a URL -> redis-cli's options for the same files."""


def complete_url(
    url: str, user: str | None, ca_file: Path | None, certificate_file: Path | None, key_file: Path | None
) -> str:
    """Add the user to `url`, if it names none, and the TLS files. Raises `ConfigError` for TLS files if `url` is not
    `rediss://`: the connection would not be encrypted.
    """
    files = zip(TLS_OPTIONS, (ca_file, certificate_file, key_file), strict=True)
    options = {option: str(path) for option, path in files if path}
    if options and not url.startswith("rediss://"):
        raise ConfigError(
            f"server URL {mask_url(url)!r}: has no TLS, but TLS files are given (ca_file, certificate_file, "
            "key_file): write rediss://, or leave them out"
        )
    if user and not urlsplit(url).username:
        url = url.replace("://", f"://{quote(user, safe='')}@", 1)
    return f"{url}{'&' if '?' in url else '?'}{urlencode(options)}" if options else url


def has_password(url: str) -> bool:
    """Whether `url` contains a password for the server or for a TLS key, even if it is malformed."""
    login = url.partition("://")[2] or url
    return bool(re.match(r"[^:@?]*:[^?]+@", login) or re.search(r"(?i)[?&][^=&]*password=[^&]", url))


def mask_url(url: str) -> str:
    """Replace user, password and secret options in `url` by `***`, even if it is malformed."""
    url = re.sub(r"^([^@/]*://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)([?&][^=&]*password=)[^&]*", r"\1***", url)


def address(client: redis.Redis) -> str:
    """The URL of the server that `client` talks to, without user and password."""
    options = client.connection_pool.connection_kwargs
    database = options.get("db", 0)
    if "path" in options:
        return f"unix://{quote(options['path'])}?db={database}"
    scheme = "rediss" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else "redis"
    host = options.get("host", "localhost")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{options.get('port', 6379)}/{database}"


def cli_command(client: redis.Redis, command: str) -> str:
    """The shell line that sends `command` to `client`'s server and asks for any password needed."""
    options = client.connection_pool.connection_kwargs
    where = f"-s {options['path']}" if "path" in options else f"-h {options.get('host')} -p {options.get('port', 6379)}"
    tls = " --tls" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else ""
    tls += "".join(f" --{name} {options[option]}" for option, name in TLS_OPTIONS.items() if options.get(option))
    user = f" --user {options['username']}" if options.get("username") else ""
    login = f"{user} --askpass" if options.get("password") else ""
    return f"redis-cli {where}{tls}{login} {command}"

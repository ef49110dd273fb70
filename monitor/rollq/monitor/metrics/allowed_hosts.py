"""Checks the host name of requests: a foreign page whose name points to this machine gets no answer."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollq.buffer.errors import ConfigError

NAME: Final = re.compile(r"[\w-]+(\.[\w-]+)*\.?")


class KnownHosts:
    """An app that answers requests only for known names: loopback, the allowed names, and the address at which a
    request arrived."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        """Raises `ConfigError` if one of `allowed` is not a name or an address."""
        self._app, self._allowed = app, frozenset(map(_checked, allowed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http" or self._is_known(name := name_in(Request(scope).headers.get("host")), scope):
            await self._app(scope, receive, send)
            return
        advice = f"start it with --allowed-host {name}" if name.isprintable() and name else "send the header Host"
        refusal = PlainTextResponse(
            f"this server does not answer to the name {name[:100]!r}: {advice[:140]}\n",
            status_code=421,
            headers={"x-content-type-options": "nosniff"},
        )
        await refusal(scope, receive, send)

    def _is_known(self, name: str, scope: Scope) -> bool:
        address, _ = scope.get("server") or ("", None)
        return name in self._allowed or is_loopback(name) or (bool(name) and name == _plain(str(address)))


def is_loopback(host: str) -> bool:
    """Whether a name or address belongs only to this machine. Pure."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def names_of(host: str) -> tuple[str, ...]:
    """The names of a server that listens at `host`: only `host`, unless it means all addresses. Pure."""
    return () if _is_address(host) and ipaddress.ip_address(host).is_unspecified else (host,)


def name_in(host: str | None) -> str:
    """The name in the header `Host`, without its port; "" if there is none. Pure."""
    try:
        return _plain(urlsplit(f"//{host or ''}").hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    """A name in the form for comparisons."""
    name = name.lower().removesuffix(".")
    return name.removeprefix("::ffff:") if "." in name else name


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None and not _is_address(name):
        raise ConfigError(f"--allowed-host {name}: give a name or an address, without http:// and without a port")
    return _plain(name)

"""Who may ask: the names of the host that are answered, the token of changes, and the headers of every answer."""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guarded:
    """An app that answers only requests for its host, with the headers that keep other pages and scripts out.

    Where it listens on a loopback address, `Host` must name one: a page elsewhere whose name was pointed here gets
    nothing. Elsewhere every name is answered, since the app cannot know its names.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        """`host`: where it listens."""
        self._app, self._is_local = app, is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] == "http" and self._is_local and not is_loopback(_name(Request(scope).headers.get("host"))):
            refusal = PlainTextResponse("this dashboard answers only to 127.0.0.1 and localhost\n", status_code=421)
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal_of(request: Request, token: str | None) -> str:
    """Why a request may not change the run; "" if it may.

    The token is in the header `Authorization: Bearer ...`, so no other page can send it; one that tries has another
    `Origin`.
    """
    if token is None:
        return "this dashboard only reads: start it with --token-file, or with ROLLQ_DASHBOARD_TOKEN"
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return "changes are taken only from the dashboard's own page"
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        return "the token is wrong"
    return ""


def _name(host: str | None) -> str:
    return urlsplit(f"//{host or ''}").hostname or ""

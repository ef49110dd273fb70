"""Who may change the run, and the headers that keep other pages and scripts out."""

import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Guarded:
    """An app that adds, to each answer, the headers that keep other pages and scripts out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, with these headers."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)


def refusal_of(request: Request, token: str | None) -> str:
    """Why a request may not change the run; "" if it may.

    The token is in the header `Authorization: Bearer ...`, so no other page can send it; a page that tries has a
    different `Origin`.
    """
    if token is None:
        return "this dashboard only reads: start it with --token-file, or with ROLLQ_DASHBOARD_TOKEN"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return "changes are accepted only from the dashboard's own page"
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        return "the token is wrong"
    return ""

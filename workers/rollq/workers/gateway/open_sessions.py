"""The gateway of a worker: the sessions that are open, each behind a token, and those that wait for a harness.

Invariant: a session is found by its token alone, which is in this process's memory only, and never logged.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.sessions.answering import session_over
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.settings import GatewaySettings

SESSION_PATH: Final = "/s/"
TOKEN_BYTES: Final = 32
KEY_VARIABLE: Final = "ROLLQ_GATEWAY_KEY"
RETRY_S: Final = 2
"""When to ask again for a session, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A session that waits for an outside harness: its token, its prompt, and the event of its being taken."""

    token: str
    prompt: Any
    taken: asyncio.Event


class Gateway:
    """The sessions of one worker. A server makes them reachable at `url`."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.is_wanted = False
        self.url = ""
        self._sessions: dict[bytes, Session] = {}  # by the digest of their token
        self._offers: deque[Offer] = deque()

    def want(self) -> None:
        """Ask for a server, which starts with the worker. Raises `ConfigError` without the package aiohttp."""
        if find_spec("aiohttp") is None:
            raise ConfigError("agent loops over the gateway need the package aiohttp: pip install 'rollq[gateway]'")
        self.is_wanted = True

    @contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """Serve a session; yields its token."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        key = _digest(token)
        self._sessions[key] = session
        try:
            yield token
        finally:
            del self._sessions[key]

    @contextmanager
    def offering(self, token: str, prompt: Any) -> Iterator[asyncio.Event]:
        """Offer a session to outside harnesses; yields the event that is set once a harness has taken it."""
        offer = Offer(token, prompt, asyncio.Event())
        self._offers.append(offer)
        try:
            yield offer.taken
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    def take(self, key: str) -> dict[str, Any]:
        """The oldest offered session, for a harness with the operator's key. Raises `CallRefused`."""
        expected = os.environ.get(KEY_VARIABLE, "")
        if not expected or not hmac.compare_digest(key.encode(errors="replace"), expected.encode()):
            raise CallRefused(
                f"a session needs the key in {KEY_VARIABLE} of the worker", status=401, code="invalid_key"
            )
        waiting = (offer for offer in self._offers if not self._sessions[_digest(offer.token)].is_over)
        offer = next(waiting, None)
        if offer is None:
            raise CallRefused("no session waits for a harness", status=429, code="no_session", retry_after_s=RETRY_S)
        self._offers.remove(offer)
        offer.taken.set()
        base = self.base_url(offer.token)
        return {"prompt": offer.prompt, "token": offer.token, "session_url": base, "openai_base_url": f"{base}/v1"}

    def base_url(self, token: str) -> str:
        """The base URL of a session, without `/v1`."""
        return f"{self.url}{SESSION_PATH}{token}"

    def session_of(self, token_in_path: str, tokens: Sequence[str]) -> Session:
        """The session of a request with these tokens. Raises `CallRefused`.

        Clients with a token in their base URL may send any other key except another session's token.
        """
        in_path = self._sessions.get(_digest(token_in_path)) if token_in_path else None
        sessions = {session for token in tokens if (session := self._sessions.get(_digest(token))) is not None}
        if in_path is not None:
            sessions.add(in_path)
        if len(sessions) > 1:
            raise CallRefused("the request has the tokens of two sessions", status=401, code="invalid_token")
        if not sessions or (token_in_path and in_path is None):
            raise session_over()
        return sessions.pop()


def _digest(token: str) -> bytes:
    """The key to look up a token by, so that the time of a lookup says nothing about the token."""
    return hashlib.sha256(token.encode(errors="replace")).digest()

"""A worker's gateway: its open sessions, each behind a token.

Invariant: only its token leads to a session. The token stays in this process's memory and is never logged. Setting the
outcome needs a second token, which the program's tools do not have, unless the settings let the program set its reward.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.errors import ConfigError
from rollq.workers.gateway.calls import CallRefused, session_over
from rollq.workers.gateway.offers import Offers, Taker
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.settings import GatewaySettings

log = logging.getLogger(__name__)

SESSION_PATH: Final = "/s/"
TOKEN_BYTES: Final = 32
KEY_VARIABLE: Final = "ROLLQ_GATEWAY_KEY"


class Gateway:
    """One worker's sessions. A server makes them reachable at `url`; sessions of `tasks` are offered to programs
    elsewhere. `refused_outcomes` counts requests that set an outcome without the token for it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.is_wanted = False
        self.url = ""
        self.offers = Offers()
        self.tasks: set[str] = set()
        self.refused_outcomes = 0
        self._operator = Taker(self.offers)
        self._takers: dict[bytes, Taker] = {}  # by the digest of their key
        self._sessions: dict[bytes, Session] = {}  # by the digest of their token
        self._refusals = OnceAMinute()
        self._outcomes: dict[bytes, Session] = {}  # by the digest of the token for their outcome

    def want(self) -> None:
        """Request a server, which starts with the worker. Raises `ConfigError` without the package aiohttp."""
        if find_spec("aiohttp") is None:
            raise ConfigError("agent loops over the gateway need the package aiohttp: pip install 'rollq[gateway]'")
        self.is_wanted = True

    @contextmanager
    def serving(self, session: Session, *, token: str | None = None, reward_token: str = "") -> Iterator[str]:
        """Serve a session and yield its token, new by default. `reward_token`, if not empty, is the token for its
        outcome."""
        token = token or new_token()
        key, reward_key = _digest(token), _digest(reward_token)
        self._sessions[key] = session
        if reward_token:
            self._outcomes[reward_key] = session
        try:
            yield token
        finally:
            del self._sessions[key]
            self._outcomes.pop(reward_key, None)

    @contextmanager
    def admitting(self, key: str, taker: Taker) -> Iterator[None]:
        """Give sessions to a program that the worker has started, under a separate key."""
        self._takers[_digest(key)] = taker
        try:
            yield
        finally:
            del self._takers[_digest(key)]

    def taker(self, key: str) -> Taker:
        """The program with this key, which may be the operator's. Raises `CallRefused` for an unknown key."""
        if (taker := self._takers.get(_digest(key))) is not None:
            return taker
        expected = os.environ.get(KEY_VARIABLE, "")
        if not expected or not hmac.compare_digest(key.encode(errors="replace"), expected.encode()):
            raise CallRefused(
                f"a session needs the key in {KEY_VARIABLE} of the worker", status=401, code="invalid_key"
            )
        return self._operator

    def base_url(self, token: str) -> str:
        """The base URL of a session, without `/v1`."""
        return f"{self.url}{SESSION_PATH}{token}"

    def addresses(self, token: str) -> dict[str, str]:
        """A session's token and addresses, for a program elsewhere."""
        base = self.base_url(token)
        return {"token": token, "session_url": base, "openai_base_url": f"{base}/v1"}

    def session_of(self, token_in_path: str, tokens: Sequence[str]) -> Session:
        """Return the session of a request with these tokens. Raises `CallRefused`.

        Clients with a token in their base URL may send any other key except another session's token.
        """
        in_path = _among(self._sessions, [token_in_path])
        session = _only(in_path | _among(self._sessions, tokens))
        if session is None or (token_in_path and not in_path):
            raise session_over()
        return session

    def session_of_outcome(self, token_in_path: str, tokens: Sequence[str]) -> Session:
        """Return the session whose outcome a request with these tokens sets. Raises `CallRefused`, and counts requests
        that have only the session's token."""
        # programs that may set their rewards have one token for both
        given = _only(_among(self._outcomes, tokens) or _among(self._outcomes, [token_in_path]))
        if given is None:
            session = self.session_of(token_in_path, tokens)
            session.refused_outcomes += 1
            self.refused_outcomes += 1
            if count := self._refusals.count():
                log.warning("%d requests tried to set the reward of a session without its reward_token", count)
            raise CallRefused(
                "rewards and failures need the session's reward_token, which the token of the session does not replace",
                status=401,
                code="invalid_token",
            )
        if token_in_path:
            _only({given, self.session_of(token_in_path, ())})
        return given


def new_token() -> str:
    """A new unguessable secret."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def _digest(token: str) -> bytes:
    """A token's lookup key. The duration of a lookup reveals nothing about the token."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _among(sessions: Mapping[bytes, Session], tokens: Iterable[str]) -> set[Session]:
    """The sessions with these tokens."""
    return {session for token in tokens if (session := sessions.get(_digest(token))) is not None}


def _only(sessions: Set[Session]) -> Session | None:
    """The session; None if there is none. Raises `CallRefused` for two."""
    if len(sessions) > 1:
        raise CallRefused("the request has the tokens of two sessions", status=401, code="invalid_token")
    return next(iter(sessions), None)

"""Who is answered, and who may change the run."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from rollq.monitor.dashboard.access import POLICY, Guarded, is_loopback, refusal_of


def asked(**headers: str) -> Request:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": pairs})


def answer(listens_at: str, name: str) -> tuple[int, dict[str, str], bytes]:
    """The answer of an app to a request for the host `name`: status, headers, body."""
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", name.encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
    asyncio.run(Guarded(app, listens_at)(scope, receive, send))
    given = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], given, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("name", ["127.0.0.1", "127.0.0.1:8484", "localhost:1", "[::1]:8484"])
def test_on_loopback_only_its_names_are_answered(name: str) -> None:
    status, headers, body = answer("127.0.0.1", name)
    assert (status, body) == (200, b"hello")
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8484", "localhost.evil"])
def test_on_loopback_another_name_gets_nothing(name: str) -> None:
    status, _, body = answer("127.0.0.1", name)
    assert status == 421
    assert b"hello" not in body
    assert answer("0.0.0.0", name)[2] == b"hello"


def test_a_loopback_address_is_known() -> None:
    assert is_loopback("::1")
    assert not is_loopback("")
    assert not is_loopback("0.0.0.0")


def test_without_a_token_nothing_may_change() -> None:
    assert "only reads" in refusal_of(asked(authorization="Bearer "), None)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer right ", "Basic right", "Bearer wrong", "Bearer rightx", "right"]
)
def test_only_the_token_may_change(given: str) -> None:
    is_right = given == "Bearer right "
    assert (refusal_of(asked(authorization=given, host="a:1"), "right") == "") is is_right


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://a:2", "http://a"])
def test_another_page_may_not_change_even_with_the_token(origin: str) -> None:
    assert "own page" in refusal_of(asked(authorization="Bearer right", host="a:1", origin=origin), "right")
    assert refusal_of(asked(authorization="Bearer right", host="a:1", origin="http://a:1"), "right") == ""

"""Who may change the run, and the headers of answers."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from rollq.monitor.dashboard.access import POLICY, Guarded, refusal_of


def asked(**headers: str) -> Request:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": pairs})


def test_every_answer_keeps_other_pages_and_scripts_out() -> None:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(Guarded(app)(scope, receive, send))
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    assert sent[0]["status"] == 200
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"


def test_without_a_token_nothing_may_change() -> None:
    assert "only reads" in refusal_of(asked(authorization="Bearer "), None)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer right ", "Basic right", "Bearer wrong", "Bearer rightx", "right"]
)
def test_only_the_token_may_change(given: str) -> None:
    is_right = given == "Bearer right "
    assert (refusal_of(asked(authorization=given, host="a:1"), "right") == "") is is_right


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://a:2", "http://a", "http://[", "a:1", "http://a:1/x"]
)
def test_another_page_may_not_change_even_with_the_token(origin: str) -> None:
    assert "own page" in refusal_of(asked(authorization="Bearer right", host="a:1", origin=origin), "right")
    assert refusal_of(asked(authorization="Bearer right", host="a:1", origin="http://a:1"), "right") == ""

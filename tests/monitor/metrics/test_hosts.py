"""Names of the host that are answered: a page whose name was pointed here gets nothing."""

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Scope

from rollq.buffer.errors import ConfigError
from rollq.monitor.metrics.allowed_hosts import KnownHosts, is_loopback, names_of

ANYWHERE = "0.0.0.0"
SECRET = b"hello"


def answer(
    host: str | None, *allowed: str, listens_at: str = ANYWHERE, arrived_at: str = "10.0.0.1"
) -> tuple[int, str]:
    """Status and text of the answer to a request for a host."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [] if host is None else [(b"host", host.encode("latin-1"))]
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "server": (arrived_at, 8484)}
    app = KnownHosts(PlainTextResponse(SECRET), (*names_of(listens_at), *allowed))
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.parametrize("listens_at", [ANYWHERE, "::", "127.0.0.1", "trainer-machine"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8484", "localhost:1", "LOCALHOST", "[::1]:8484"])
def test_names_of_loopback_are_answered(host: str, listens_at: str) -> None:
    assert answer(host, listens_at=listens_at) == (200, "hello")


@pytest.mark.parametrize("listens_at", [ANYWHERE, "::", "127.0.0.1"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.9:8484",
        "localhost.evil",
        "evil@",
        "[",
        "[::1",
        "é",
        "",
        None,
        "::",
    ],
)
def test_other_names_get_nothing_and_the_remedy(host: str | None, listens_at: str) -> None:
    status, text = answer(host, listens_at=listens_at)
    assert status == 421
    assert "hello" not in text
    assert "--allowed-host" in text or "send the header Host" in text


def test_the_remedy_names_the_host_and_works() -> None:
    assert answer("dash.example:80") == (
        421, "this server does not answer to the name 'dash.example': start it with --allowed-host dash.example\n",
    )  # fmt: skip
    assert answer("Dash.Example.:80", "other", "dash.example")[0] == 200
    assert answer("sub.dash.example", "dash.example")[0] == 421
    assert answer("[2001:db8::1]:80", "2001:DB8::1")[0] == 200


def test_the_host_that_it_listens_at_is_answered() -> None:
    assert answer("trainer-machine:8484", listens_at="trainer-machine")[0] == 200
    assert answer("10.0.0.1:8484", listens_at="10.0.0.1")[0] == 200
    assert answer("0.0.0.0:8484")[0] == 421


def test_the_address_at_which_a_request_arrives_is_answered() -> None:
    assert answer("10.0.0.1:8484", arrived_at="10.0.0.1")[0] == 200
    assert answer("10.0.0.1:8484", arrived_at="::ffff:10.0.0.1")[0] == 200
    assert answer("10.0.0.1:8484", arrived_at="10.0.0.2")[0] == 421
    assert answer("", arrived_at="")[0] == 421


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a/b", "[::1]:5", "a b", "*"])
def test_what_is_not_a_name_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--allowed-host .*: give a name or an address, without http:// and without a"
    ):
        answer("127.0.0.1", name)


def test_a_loopback_address_is_known() -> None:
    assert is_loopback("::1")
    assert not is_loopback("")
    assert not is_loopback("0.0.0.0")

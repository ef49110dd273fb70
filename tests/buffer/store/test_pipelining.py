"""Commands in one trip: their bytes, and the replies of transactions."""

from typing import Any

import pytest
import redis

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.pipelining import SEND_BYTES, Command, Transaction, _pack, pipeline
from rollq.buffer.store.servers import OneServer

LARGE = b"x" * SEND_BYTES


@pytest.mark.parametrize(
    "command", [("SET", "key", LARGE, "NX"), ("FCALL", "f", 1, "ä", LARGE, b"", 1.5, LARGE), ("GET", "key")]
)
def test_large_arguments_are_packed_as_the_driver_packs_them(buffer: Buffer, command: Command) -> None:
    connection: Any = buffer.client.connection_pool.make_connection()
    pieces = list(_pack(connection, command))
    assert b"".join(pieces) == b"".join(connection.pack_command(*command))
    assert sum(piece is LARGE for piece in pieces) == command.count(LARGE)


def exchange(buffer: Buffer, *commands: Command | Transaction) -> list[Any]:
    return pipeline(buffer.servers, Patience(unanswered_s=0, unready_s=0), lambda: commands, lambda _, reply: reply)


def test_a_transaction_has_the_reply_of_its_last_command(buffer: Buffer) -> None:
    key = buffer.run
    found = exchange(
        buffer,
        ("SET", key, LARGE),
        Transaction([("SET", key, b"other", "NX"), ("GET", key)]),
        ("STRLEN", key),
        Transaction([("DEL", key), ("SET", key, b"new", "NX"), ("GET", key)]),
    )
    assert found == [b"OK", LARGE, len(LARGE), b"new"]


def test_a_transaction_that_the_server_refuses_does_nothing_and_the_next_command_runs(buffer: Buffer) -> None:
    key = buffer.run
    refused, left = exchange(buffer, Transaction([("SET", key, b"1"), ("NO_SUCH_COMMAND",)]), ("EXISTS", key))
    assert "unknown command" in str(refused)
    assert left == 0


def test_an_error_inside_a_transaction_is_its_reply(buffer: Buffer) -> None:
    key = buffer.run
    wrong, kept = exchange(buffer, Transaction([("SET", key, b"text"), ("INCR", key)]), ("GET", key))
    assert "not an integer" in str(wrong)
    assert kept == b"text"


def test_a_right_that_is_missing_inside_a_transaction_is_raised(buffer: Buffer) -> None:
    client: Any = buffer.client
    at = client.connection_pool.connection_kwargs
    client.acl_setuser("narrow", enabled=True, nopass=True, keys="*", commands=["+multi", "+exec", "+set"])
    with redis.Redis(host=at["host"], port=at["port"], username="narrow", password="any", protocol=2) as narrow:
        commands = [Transaction([("SET", "key", b"1"), ("DEL", "key")])]
        with pytest.raises(ServerRefused, match="no permissions"):
            pipeline(OneServer(narrow), Patience(unanswered_s=0, unready_s=0), lambda: commands, lambda _, reply: reply)
    client.acl_deluser("narrow")
    assert not client.exists("key")

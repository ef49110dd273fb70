"""Who makes room for whom, decided without sockets."""

from dataclasses import dataclass, field

import pytest

from rollq.buffer.listening.connections import KNOWN_S, STRANGER_S, Connection, Connections, Party, State
from rollq.buffer.listening.limits import ConnectionLimits, address_of, limits_for


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@dataclass
class Door:
    """Twelve connections at most, four of an address, four of a token."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.connections = Connections(ConnectionLimits(12, 4, 4), self.clock)

    def come(self, address: str, count: int = 1, token: str | None = None) -> list[Connection]:
        found = []
        for _ in range(count):
            connection = self.connections.admit(address)
            assert connection is not None
            if token is not None:
                self.connections.move(connection, Party(token, has_token=True))
            found.append(connection)
        return found


def test_an_address_that_has_its_share_loses_its_oldest() -> None:
    door = Door()
    first, second, *_ = door.come("10.0.0.1", 4)
    door.connections.enter(first, State.STREAMING)
    door.come("10.0.0.1")
    assert second.is_closed
    assert not first.is_closed
    assert len(door.connections) == 4


def test_what_is_answered_stays_longer_than_a_stream_and_a_stream_longer_than_what_waits() -> None:
    door = Door()
    answering, streaming, waiting, other = door.come("10.0.0.1", 4)
    door.connections.enter(answering, State.ANSWERING)
    door.connections.enter(streaming, State.STREAMING)
    door.connections.enter(other, State.ANSWERING)
    (fresh,) = door.come("10.0.0.1")
    assert waiting.is_closed
    door.connections.enter(fresh, State.ANSWERING)
    door.come("10.0.0.1")
    assert streaming.is_closed
    assert not answering.is_closed


def test_at_the_bound_the_address_that_holds_most_makes_room() -> None:
    door = Door()
    crowd = door.come("10.0.0.1", 4)
    known = door.come("10.0.0.2", 5, token="a")
    few = [*door.come("10.0.0.3", 2), *door.come("10.0.0.4", 1)]
    assert len(door.connections) == 12
    door.come("10.0.0.5")
    assert [one.is_closed for one in crowd] == [True, False, False, False]
    assert not any(one.is_closed for one in [*known, *few])


def test_a_token_gives_way_only_where_it_has_more_than_its_share() -> None:
    door = Door()
    many = door.come("10.0.0.1", 8, token="a")
    few = door.come("10.0.0.1", 4, token="b")
    door.come("10.0.0.1", 1, token="b")
    assert sum(one.is_closed for one in many) == 1
    assert not any(one.is_closed for one in few)


def test_when_all_have_shown_tokens_another_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    known = [one for token in "abc" for one in door.come("10.0.0.1", 4, token=token)]
    assert [door.connections.admit("10.0.0.9") for _ in range(50)] == [None] * 50
    assert not any(one.is_closed for one in known)
    assert len(caplog.records) == 1
    door.clock.now_s += 61
    door.connections.admit("10.0.0.9")
    assert "refused since the last such message: 50;" in caplog.records[-1].getMessage()


def test_closing_for_room_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    door.come("10.0.0.1", 1000)
    assert len(door.connections) == 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize("token", [None, "a"])
@pytest.mark.parametrize("state", list(State))
def test_each_state_has_its_time(state: State, token: str | None) -> None:
    door = Door()
    (connection,) = door.come("10.0.0.1", token=token)
    door.connections.enter(connection, state)
    limit_s = (STRANGER_S if token is None else KNOWN_S)[state]
    door.clock.now_s += min(limit_s, 1e6) - 1
    door.connections.close_late()
    assert not connection.is_closed
    door.clock.now_s += 2
    door.connections.close_late()
    assert connection.is_closed == (limit_s < 1e6)
    assert len(door.connections) == int(limit_s >= 1e6)


def test_a_connection_whose_token_is_over_is_a_strangers_again() -> None:
    door = Door()
    (connection,) = door.come("10.0.0.1", token="a")
    door.connections.move(connection, Party("10.0.0.1", has_token=False))
    door.come("10.0.0.1", 4)
    assert connection.is_closed
    door.connections.move(connection, Party("a", has_token=True))  # a request that was under way
    assert len(door.connections) == 4


def test_a_process_keeps_half_of_its_files() -> None:
    assert limits_for(1024) == ConnectionLimits(512, 128, 64)
    assert limits_for(128) == ConnectionLimits(64, 16, 16)
    assert limits_for(1_000_000) == ConnectionLimits(4096, 256, 64)


def test_a_host_has_one_address() -> None:
    assert address_of(("10.0.0.1", 4000)) == address_of(("::ffff:10.0.0.1", 1, 0, 0)) == "10.0.0.1"
    assert address_of(("2001:db8::1", 1, 0, 0)) == address_of(("2001:db8::ffff:1", 2, 0, 0)) == "2001:db8::/64"
    assert address_of(("fe80::1%eth0", 1, 0, 2)) == "fe80::/64"
    assert address_of("") == ""

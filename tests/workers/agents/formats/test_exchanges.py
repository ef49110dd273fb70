"""A table of turns for each format, and what the format makes of them."""

import pytest

from rollq.workers.agents.chat_formats import BUILT_IN
from rollq.workers.agents.tool_calls import Malformed
from rollq.workers.agents.turns import Turn
from support.exchanges import EXCHANGES, MALFORMED, TOOLS, Exchange

CASES = [
    pytest.param(name, exchange, id=f"{name}: {shows}")
    for name, exchanges in EXCHANGES.items()
    for shows, exchange in exchanges.items()
]


def parse(name: str, exchange: Exchange) -> Turn:
    return BUILT_IN[name].parser(exchange.text, TOOLS, exchange.prompt)


@pytest.mark.parametrize(("name", "exchange"), CASES)
def test_a_turn_is_parsed(name: str, exchange: Exchange) -> None:
    turn = parse(name, exchange)
    found = tuple(MALFORMED if isinstance(call, Malformed) else call for call in turn.calls)
    assert (found, turn.content, turn.reasoning) == (exchange.calls, exchange.content, exchange.reasoning)
    assert turn.text == exchange.text
    assert all(call.problem for call in turn.calls if isinstance(call, Malformed))


@pytest.mark.parametrize(("name", "exchange"), CASES)
def test_calls_have_ids_that_stay_the_same(name: str, exchange: Exchange) -> None:
    ids = [call.id for call in parse(name, exchange).well_formed]
    assert len(set(ids)) == len(ids)
    assert all(len(id) == 9 for id in ids)
    assert ids == [call.id for call in parse(name, exchange).well_formed]


def test_every_format_has_a_table() -> None:
    assert EXCHANGES.keys() == BUILT_IN.keys()


def test_an_id_of_mistral_is_kept_if_its_template_would_accept_it() -> None:
    for id, kept in (("bbc5b7ede", True), ("call_1", False)):
        text = f'[TOOL_CALLS][{{"name": "now", "arguments": {{}}, "id": "{id}"}}]'
        (call,) = BUILT_IN["mistral"].parser(text, (), "").well_formed
        assert (call.id == id) is kept

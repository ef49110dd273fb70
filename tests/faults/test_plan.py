"""The plan is a pure function of its seed."""

from itertools import pairwise

from faults.__main__ import COUNTED
from faults.chaos import role_names
from faults.plan import CALM, Fault, Odds, make_judge, make_plan
from support.proxy import PASS, Fate, function_of, name_of

PUT = b"*4\r\n$5\r\nFCALL\r\n$11\r\nrollq_6_put\r\n$1\r\n1\r\n$1\r\nk\r\n"
GET = b"*2\r\n$3\r\nget\r\n$1\r\nk\r\n"
SUBSCRIBE = b"*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nk\r\n"


def plan(seed: int, count: int = 100) -> list[Fault]:
    return make_plan(seed, count, role_names(3), gap_s=0.4, longest_s=4.0)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_a_plan_covers_every_role_and_every_kind_in_order() -> None:
    faults = plan(1, 500)
    assert {fault.target for fault in faults} == set(role_names(3))
    assert {fault.kind for fault in faults} == set(COUNTED)
    assert all(before.at_s <= after.at_s for before, after in pairwise(faults))


def test_a_command_has_the_same_fate_under_the_same_seed() -> None:
    odds = Odds(lose=0.2, drop=0.2, copy=0.2, delay=0.2)
    first, again = (make_judge(3, "worker0", odds) for _ in range(2))
    fates = [first(PUT) for _ in range(200)]
    assert fates == [again(PUT) for _ in range(200)]
    assert {verdict.fate for verdict in fates} == set(Fate)


def test_only_functions_are_copied_and_subscriptions_pass() -> None:
    judge = make_judge(3, "worker0", Odds(copy=1.0))
    assert judge(PUT).fate in (Fate.COPY, Fate.LOSE, Fate.DROP)
    assert all(judge(GET).fate is not Fate.COPY for _ in range(100))
    assert judge(SUBSCRIBE) == PASS
    assert make_judge(3, "worker0", CALM)(PUT) == PASS


def test_commands_are_known_by_their_names() -> None:
    assert (name_of(GET), function_of(GET)) == (b"GET", "")
    assert (name_of(PUT), function_of(PUT)) == (b"FCALL", "put")

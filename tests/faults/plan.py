"""When which fault happens. Pure: the same seed gives the same plan, and the same fate to the same command."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from support.proxy import PASS, Fate, Judge, Verdict, function_of, name_of

Kind = Literal["kill", "stop", "zombie", "partition", "failover", "move", "forget", "evict", "order", "rules", "delete"]
SERVER = "server"
TRAINER = "trainer"
OPERATOR = "operator"
ZOMBIE_SHARE = 0.2
OF_ROLES: Sequence[Kind] = ("kill", "kill", "stop", "partition")
OF_SERVER: Sequence[Kind] = ("kill", "kill", "stop", "forget", "evict")
OF_OPERATOR: Sequence[Kind] = ("order", "order", "order", "rules", "delete")
AT_ONCE = ("kill", "forget", "order", "rules", "delete")
"""Faults that do not last."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at `at_s` after the start. `target` is a role's name, `server` or `operator`, and `for_s` the duration
    of the fault in seconds.

    kill: SIGKILL; stop: SIGSTOP, and SIGCONT afterwards; partition: no byte passes between the role and the server;
    zombie: the trainer is stopped, a successor takes over, and then it continues; failover: SIGKILL to the server, and
    its replica, which was cut off `for_s` before, takes its place; move: the slot of a task moves to another primary of
    the cluster; forget: FUNCTION FLUSH; evict: the server's policy lets it evict keys; order: a group is dropped,
    requeued or put aside; rules: the size of a task's batches changes; delete: the run is saved, deleted and restored.
    On a cluster, `server` is any of its nodes, and a killed one comes back after `for_s`.
    """

    at_s: float
    kind: Kind
    target: str
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Odds:
    """Probability of each fate, per command."""

    lose: float = 0.003
    drop: float = 0.005
    copy: float = 0.01
    delay: float = 0.02
    longest_delay_s: float = 0.05
    longest_copy_s: float = 3.0


CALM = Odds(lose=0, drop=0, copy=0, delay=0)


def make_plan(seed: int, count: int, roles: Sequence[str], *, gap_s: float, longest_s: float) -> list[Fault]:
    """`count` faults over `roles`, a mean of `gap_s` apart. Most are kills; the others last `longest_s` at most."""
    rng = random.Random(f"plan {seed}")
    faults, at_s = [], 1.0
    for _ in range(count):
        at_s += rng.expovariate(1 / gap_s)
        target = rng.choice(roles)
        kind: Kind = rng.choice({SERVER: OF_SERVER, OPERATOR: OF_OPERATOR}.get(target, OF_ROLES))
        if target.startswith(TRAINER) and kind == "stop" and rng.random() < ZOMBIE_SHARE:
            kind = "zombie"
        faults.append(
            Fault(
                at_s,
                kind,
                target,
                for_s=0.0 if kind in AT_ONCE else rng.choice([longest_s / 12, longest_s / 4, longest_s]),
            )
        )
    return faults


def make_recovery_plan(kills: int, roles: Sequence[str], *, every_s: float) -> list[Fault]:
    """`kills` kills of `roles` in turn, far enough apart to see each recovery alone."""
    return [Fault(every_s * (number + 1), "kill", roles[number % len(roles)]) for number in range(kills)]


def make_failover_plan(count: int, *, every_s: float, behind_s: float) -> list[Fault]:
    """`count` failovers to a replica that is `behind_s` behind."""
    return [Fault(every_s * (number + 1), "failover", SERVER, for_s=behind_s) for number in range(count)]


def make_cluster_plan(seed: int, count: int, roles: Sequence[str], *, gap_s: float, longest_s: float) -> list[Fault]:
    """`count` faults, about half of them of the nodes, which are killed, stopped, or give a slot away."""
    rng = random.Random(f"cluster {seed}")
    faults, at_s = [], 1.0
    for _ in range(count):
        at_s += rng.expovariate(1 / gap_s)
        target = SERVER if rng.random() < 0.5 else rng.choice([role for role in roles if role != SERVER])
        kind: Kind = rng.choice(["kill", "kill", "stop"]) if target != SERVER else rng.choice(["kill", "stop", "move"])
        if target == SERVER:  # of one node at a time: those with one replica survive no second fault
            at_s += longest_s
        faults.append(Fault(at_s, kind, target, for_s=rng.choice([0.0, longest_s / 4, longest_s])))
    return faults


def make_judge(seed: int, proxy: str, odds: Odds) -> Judge:
    """The fates of the commands that pass one proxy, by their number. Only rollq's functions are copied."""
    numbers = iter(range(1 << 62))

    def judge(command: bytes) -> Verdict:
        rng = random.Random(f"{seed} {proxy} {next(numbers)}")
        draw, delay_s = rng.random(), rng.random()
        if name_of(command) in (b"SUBSCRIBE", b"PSUBSCRIBE", b"UNSUBSCRIBE"):
            return PASS
        for fate, share in ((Fate.LOSE, odds.lose), (Fate.DROP, odds.drop), (Fate.COPY, odds.copy)):
            if draw < share:
                if fate is Fate.COPY and not function_of(command):
                    fate = Fate.DROP
                return Verdict(fate, delay_s * odds.longest_copy_s if fate is Fate.COPY else 0.0)
            draw -= share
        return Verdict(Fate.PASS, delay_s * odds.longest_delay_s) if draw < odds.delay else PASS

    return judge

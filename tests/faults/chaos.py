"""Runs all roles as processes, breaks them as a plan says, and has the checker judge what is left."""

import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis

from faults import processes
from faults.checker import Rules, Violation, check, samples_lent
from faults.dump import dump_run
from faults.history import OK, Event, History, read_histories, read_history
from faults.operator import delete_and_restore, order_group, resize_batches
from faults.payloads import collect, payload_folder, payloads_in
from faults.plan import CALM, OPERATOR, SERVER, TRAINER, Fault, Odds, make_cluster_plan, make_judge, make_plan
from faults.processes import LIGHT, Load, Role, write_settings
from faults.trainer import RANKS, Launch, newest_checkpoint
from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.cluster_nodes import move_slot
from support.proxy import Proxy, Verdict

PRODUCERS = ("producer0", "producer1")
IMPORTER = "importer"
RANK_NAMES = tuple(f"{TRAINER}{rank}" for rank in range(RANKS))
MODES = ("replay", "replay", "return", "regenerate")
TICK_S = 0.02
NODE_TIMEOUT_MS = 2000
SETTLE_STEPS = 4
SETTLE_S = 90.0
STOP_S = 30.0
QUIET_LEASES = 3
"""Leases in which those of killed workers run out, also when an outage has put off their reaping."""


def worker_names(workers: int) -> tuple[str, ...]:
    """The names of a run's workers."""
    return tuple(f"worker{number}" for number in range(workers))


def role_names(workers: int) -> tuple[str, ...]:
    """All that can be broken in a run."""
    return (*PRODUCERS, IMPORTER, *worker_names(workers), *RANK_NAMES, SERVER, OPERATOR)


@dataclass(frozen=True, slots=True)
class Scene:
    """One run of chaos: `fsync` of the server's append-only file, the number of `faults`, and the network's odds.

    Only roles whose names begin with `only` break.   `plan`: the faults themselves, where they are not drawn.
    `modes`: how launches of the trainer resume, in turns.   `lasts_s`: the run's time, at least.
    `cluster`: the buffer is on one, whose nodes break, and the roles reach it without a network that fails.
    """

    seed: int
    faults: int
    odds: Odds = field(default_factory=Odds)
    fsync: str = "everysec"
    workers: int = 3
    only: str = ""
    gap_s: float = 0.4
    longest_s: float = 2.5
    binary: Path | None = None
    plan: Sequence[Fault] | None = None
    load: Load = LIGHT
    modes: Sequence[str] = MODES
    release_every: int = 4
    lasts_s: float = 0.0
    cluster: bool = False

    @property
    def broken(self) -> list[str]:
        """The roles that break, and the operator, who has no orders for a cluster."""
        absent = {IMPORTER} if not self.load.offline_batch else set()
        absent |= {OPERATOR} if self.cluster else set()
        return [role for role in role_names(self.workers) if role.startswith(self.only) and role not in absent]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of chaos has shown."""

    scene: Scene
    violations: Sequence[Violation]
    done: Counter[str]
    events: Sequence[Event]
    copies: int

    @property
    def steps(self) -> int:
        """Committed steps, those that were committed again after a restart included."""
        return sum(event.what == "commit" and event.end == OK for event in self.events)

    @property
    def lent(self) -> int:
        """Samples that one worker has lent to another."""
        return samples_lent(self.events)


class Chaos:
    """The roles of one run. Use it in `with`."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._scene = scene
        self._folder = folder
        self._run = f"chaos-{scene.seed}"
        self._server = EmbeddedServer(folder / "server", binary=scene.binary)
        self._cluster = EmbeddedCluster(folder / "cluster", node_timeout_ms=NODE_TIMEOUT_MS) if scene.cluster else None
        self._random = random.Random(f"nodes {scene.seed}")
        self._replica: EmbeddedServer | None = None
        self._stack = ExitStack()
        self._proxies: dict[str, Proxy] = {}
        self._roles: dict[str, Role] = {}
        self._zombies: list[Role] = []
        self._wakes: list[tuple[float, Callable[[], None]]] = []
        self._calm = False
        self._done: Counter[str] = Counter()
        self._launches = 0
        self._workers = worker_names(scene.workers)
        self._sources = (*PRODUCERS, IMPORTER) if scene.load.offline_batch else PRODUCERS
        self._found: list[Violation] = []

    def __enter__(self) -> "Chaos":
        write_settings(self._folder, self._run, self._scene.load)
        self._history = History(self._folder / "history", "orchestrator")
        self._stack.enter_context(self._server)
        self._configure()
        if self._cluster:
            self._stack.enter_context(self._cluster)
        else:
            for name in (*self._sources, *self._workers, *RANK_NAMES):
                self._proxies[name] = self._stack.enter_context(self._proxy(name))
        queue_url = self._server.url if self._cluster else ""
        for name in PRODUCERS:
            self._roles[name] = Role(name, processes.produce, self._folder, self._url(name), queue_url)
        if IMPORTER in self._sources:
            self._roles[IMPORTER] = Role(IMPORTER, processes.insert, self._folder, self._url(IMPORTER))
        for name in self._workers:
            self._roles[name] = Role(name, processes.work, self._folder, self._url(name), name, queue_url)
        return self

    def _url(self, name: str) -> str:
        """Where a role finds the buffer."""
        return self._cluster.url if self._cluster else self._proxies[name].url

    def __exit__(self, *exc_info: object) -> None:
        for role in (*self._roles.values(), *self._zombies):
            role.send(signal.SIGKILL)
            role.wait(STOP_S)
        self._stack.close()

    def play(self) -> Outcome:
        """Carry out the plan, let everything settle, stop the roles in order, and check."""
        scene = self._scene
        draw = make_cluster_plan if scene.cluster else make_plan
        drawn = draw(scene.seed, scene.faults, scene.broken, gap_s=scene.gap_s, longest_s=scene.longest_s)
        plan = drawn if scene.plan is None else scene.plan
        if any(fault.kind == "failover" for fault in plan):
            self._replicate()
            self._live_until(lambda: self._commits() > 0, timeout_s=SETTLE_S)  # there is something to lose
        began_s = time.monotonic()
        for fault in plan:
            self._live_for(began_s + fault.at_s - time.monotonic())
            self._carry_out(fault)
        self._live_for(began_s + scene.lasts_s - time.monotonic())
        violations = self._found + self._settle()
        violations += self._stop_roles()
        events = read_histories(self._folder / "history")
        collect(self._buffer_url, self._run, self._folder)
        dump = dump_run(self._buffer_url, self._run, payload_folder(self._folder))
        violations += check(events, dump, Rules(scene.load.max_staleness + 1))
        if scene.load.lends and not samples_lent(events):
            violations.append(Violation("lent", "no sample was lent"))
        copies = sum(proxy.copies for proxy in self._proxies.values())
        return Outcome(self._scene, violations, self._done, events, copies)

    @property
    def _buffer_url(self) -> str:
        return self._cluster.url if self._cluster else self._server.url

    # -- faults -------------------------------------------------------------------------------------------------------

    def _carry_out(self, fault: Fault) -> None:
        self._done[fault.kind] += 1
        self._history.note(fault.kind, target=fault.target)
        if fault.target == SERVER and self._cluster:
            self._break_node(self._cluster, fault)
        elif fault.target == SERVER:
            self._break_server(fault)
        elif fault.target == OPERATOR:
            self._obey_operator(fault)
        elif fault.kind == "partition":
            self._proxies[fault.target].hold(fault.for_s)
        elif fault.kind == "zombie":
            self._make_zombies(fault.for_s)
        elif role := self._roles.get(fault.target):
            self._break_role(role, fault)

    def _break_role(self, role: Role, fault: Fault) -> None:
        if fault.kind == "kill":
            role.send(signal.SIGKILL)
        else:
            role.send(signal.SIGSTOP)
            self._later(fault.for_s, partial(role.send, signal.SIGCONT))

    def _break_server(self, fault: Fault) -> None:
        if fault.kind == "kill":
            self._server.kill()
            self._server.start()
            self._configure()
        elif fault.kind == "failover":
            self._fail_over(fault.for_s)
        elif fault.kind in ("forget", "evict"):
            self._misuse_server(fault)
        elif (pid := self._server.pid) is not None:
            os.kill(pid, signal.SIGSTOP)
            self._live_for(fault.for_s)
            os.kill(pid, signal.SIGCONT)

    def _misuse_server(self, fault: Fault) -> None:
        """What an administrator does who does not know rollq. Roles end while the server may evict keys."""
        with redis.Redis.from_url(self._server.url) as client:
            if fault.kind == "forget":
                client.function_flush()
                return
            client.config_set("maxmemory-policy", "allkeys-lru")
            self._live_for(fault.for_s)
            client.config_set("maxmemory-policy", "noeviction")

    def _obey_operator(self, fault: Fault) -> None:
        self._live_until(lambda: self._commits() > 0, timeout_s=SETTLE_S)  # there is something to steer
        if fault.kind == "delete":
            self._delete_run()
            return
        with self._buffer() as buffer:
            if fault.kind == "order":
                order_group(self._history, buffer, self._random)
            else:
                resize_batches(buffer, self._scene.load.batch, self._random)

    def _delete_run(self) -> None:
        """Delete the run and restore it. Workers sleep: one until it is gone, the others until it is back."""
        early, *_ = sleepers = [self._roles[name] for name in self._workers]
        self._live_until(lambda: self._has_leased(early), timeout_s=SETTLE_S)  # one that starts would create the run
        for role in (*self._roles.values(), *self._zombies):
            role.send(signal.SIGSTOP if role in sleepers else signal.SIGKILL)
        time.sleep(self._scene.longest_s + self._scene.odds.longest_copy_s)  # what is on its way arrives

        def wake() -> None:
            early.send(signal.SIGCONT)
            if not early.wait(STOP_S):
                self._found.append(Violation("deleted", f"{early.name} works for a run that is gone"))

        with self._buffer() as buffer:
            left = delete_and_restore(buffer, self._server.url, self._folder / "snapshot", wake)
        self._found += [Violation("deleted", f"{key} is there after the run was deleted") for key in left]
        for role in sleepers:
            role.send(signal.SIGCONT)

    def _has_leased(self, worker: Role) -> bool:
        """Whether a worker that is alive has leased groups since its start."""
        histories = (self._folder / "history").glob(f"{worker.name}-{worker.pid}-*")
        return worker.alive and any(event.what == "lease" for path in histories for event in read_history(path))

    def _buffer(self) -> Buffer:
        return Buffer.connect(self._buffer_url, self._run, payloads=payloads_in(self._folder))

    def _break_node(self, cluster: EmbeddedCluster, fault: Fault) -> None:
        """Break one node, once all have recovered from the last fault: with one replica, none survives two at once."""
        self._live_until(cluster.is_ready, timeout_s=SETTLE_S)
        node = self._random.choice(cluster.nodes)
        if fault.kind == "kill":
            node.kill()
            self._live_for(fault.for_s)
            node.start()
        elif fault.kind == "stop" and node.pid is not None:
            os.kill(node.pid, signal.SIGSTOP)
            self._live_for(fault.for_s)
            os.kill(node.pid, signal.SIGCONT)
        elif fault.kind == "move":
            task = self._random.choice(sorted(self._scene.load.batch))
            move_slot(cluster, f"{{{self._run}:{task}}}", self._random)

    def _replicate(self) -> None:
        """Start a replica of the server, and wait until it has everything."""
        self._replica = EmbeddedServer(self._folder / f"replica{self._done['failover']}", binary=self._scene.binary)
        self._replica.start()
        self._stack.callback(self._replica.stop)
        with redis.Redis.from_url(self._replica.url) as client:
            client.replicaof("127.0.0.1", str(self._server.port))
            self._live_until(lambda: client.info("replication")["master_link_status"] == "up")

    def _fail_over(self, behind_s: float) -> None:
        """Kill the server, and let its replica take its place: one that read to the end, or was cut off before."""
        assert self._replica is not None
        with redis.Redis.from_url(self._replica.url) as client:
            if behind_s > 0:
                client.replicaof("NO", "ONE")
                self._live_for(behind_s)
            self._server.kill()
            self._live_until(lambda: client.info("replication").get("master_link_status") != "up")
            client.replicaof("NO", "ONE")
        self._server = self._replica
        assert self._server.port is not None
        for proxy in self._proxies.values():
            proxy.redirect(self._server.port)
        self._configure()
        self._replicate()

    def _make_zombies(self, for_s: float) -> None:
        """Stop both ranks, have a successor take over, and then let them continue."""
        stopped = [self._roles.pop(name) for name in RANK_NAMES if name in self._roles]
        for role in stopped:
            role.send(signal.SIGSTOP)
            self._later(for_s, partial(role.send, signal.SIGCONT))
        self._zombies += stopped

    # -- life ---------------------------------------------------------------------------------------------------------

    def _live_until(self, happened: Callable[[], bool], *, timeout_s: float = float("inf")) -> bool:
        """Keep the roles alive until something has happened; returns whether it did in time."""
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > deadline_s:
                return False
            self._wake()
            self._revive()
            time.sleep(TICK_S)
        return True

    def _live_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self._live_until(lambda: time.monotonic() >= until_s)

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        self._wakes.append((time.monotonic() + after_s, do))

    def _wake(self, *, all_of_them: bool = False) -> None:
        due = [wake for wake in self._wakes if all_of_them or wake[0] <= time.monotonic()]
        for wake in due:
            self._wakes.remove(wake)
            wake[1]()

    def _revive(self) -> None:
        for name in (*self._sources, *self._workers):
            if not self._roles[name].alive:
                self._roles[name].start()
        ranks = [self._roles[name] for name in RANK_NAMES if name in self._roles]
        if len(ranks) < RANKS or not all(rank.alive for rank in ranks):
            for rank in ranks:  # as a launcher does
                rank.send(signal.SIGKILL)
                rank.wait(STOP_S)
            self._launch()

    def _launch(self) -> None:
        """Start all ranks of the trainer from the newest checkpoint."""
        self._launches += 1
        step, weights = newest_checkpoint(self._folder)
        zombies = any(zombie.alive for zombie in self._zombies)
        modes = self._scene.modes
        mode = "replay" if zombies else modes[self._launches % len(modes)]
        launch_id = f"{self._run}-{uuid.uuid4().hex[:8]}"
        self._history.note("launch", launch=launch_id)
        for rank, name in enumerate(RANK_NAMES):
            launch = Launch(
                self._url(name), self._run, self._folder, launch_id, mode, step, weights,
                release_every=self._scene.release_every, takeover=zombies,
            )  # fmt: skip
            self._roles[name] = Role(name, processes.train, launch, rank)
            self._roles[name].start()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> list[Violation]:
        """I7: once faults stop, training continues, and leases of dead workers run out."""
        self._calm = True
        self._wake(all_of_them=True)
        before = self._commits()
        if not self._live_until(lambda: self._commits() >= before + SETTLE_STEPS, timeout_s=SETTLE_S):
            done = self._commits() - before
            return [Violation("I7", f"{SETTLE_S:g} s after the last fault, only {done} steps were committed")]
        self._live_for(QUIET_LEASES * self._scene.load.lease_s)
        return []

    def _commits(self) -> int:
        events = read_histories(self._folder / "history")
        return sum(event.what == "commit" and event.end == OK for event in events)

    def _stop_roles(self) -> list[Violation]:
        """Stop all roles as an operator would, the trainer first."""
        found = []
        for names in (RANK_NAMES, self._sources, self._workers):
            roles = [self._roles[name] for name in names]
            for role in roles:
                role.send(signal.SIGTERM)
            found += [Violation("I7", f"{role.name} did not stop") for role in roles if not role.wait(STOP_S)]
        return found

    def _proxy(self, name: str) -> Proxy:
        assert self._server.port is not None
        rough, calm = make_judge(self._scene.seed, name, self._scene.odds), make_judge(0, name, CALM)

        def judge(command: bytes) -> Verdict:
            return (calm if self._calm else rough)(command)

        return Proxy(self._server.port, judge)

    def _configure(self) -> None:
        with redis.Redis.from_url(self._server.url) as client:
            client.config_set("appendfsync", self._scene.fsync)
            client.config_set("repl-diskless-sync-delay", 0)  # it would wait 5 s for further replicas


def run_chaos(scene: Scene, folder: Path) -> Outcome:
    """One run of chaos from beginning to end, in an empty folder."""
    with Chaos(scene, folder) as chaos:
        return chaos.play()

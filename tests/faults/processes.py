"""The roles of a run as real processes, which can be killed, stopped and started again.

They are forked from a server process that has imported rollq already, so that a restart costs milliseconds.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import orjson

from faults import trainer
from faults.history import History
from faults.inserting import keep_inserting
from faults.payloads import INLINE_BYTES, payloads_in
from faults.recording import record_worker
from faults.trainer import Launch
from rollq.buffer.buffer import Buffer
from rollq.buffer.wire import group_fields as payload
from support.forks import FORKS

SETTINGS_FILE = "rollq.toml"
LEASE_S = 1.0
MAX_STALENESS = 1
THRESHOLD = MAX_STALENESS + 1
BATCH = {"math": 4, "code": 2}
OFFLINE_BATCH = {"demos": 1}


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a run: `batch` groups per step and task, `offline_batch` of tasks that are offline, and answers of
    `lengths` tokens.

    Each worker makes `samples_in_flight` samples at a time, each with `tokens_per_s` tokens a second.
    """

    batch: Mapping[str, int] = field(default_factory=lambda: BATCH)
    offline_batch: Mapping[str, int] = field(default_factory=dict)
    group_size: int = 2
    samples_in_flight: int = 12
    lengths: Sequence[int] = (2, 4, 6, 10, 24)
    tokens_per_s: float = 200.0
    lease_s: float = LEASE_S
    max_staleness: int = MAX_STALENESS
    partial_rollout: bool = False

    @property
    def lends(self) -> bool:
        """Whether a group has more samples than a worker has places, so that others make some of them."""
        return self.group_size > self.samples_in_flight


LIGHT = Load(offline_batch=OFFLINE_BATCH, lengths=(2, 4, 6, 10, 400), tokens_per_s=2000.0, partial_rollout=True)
"""Its longest answers are salvaged."""

LENDING = Load(
    batch={"math": 1},
    group_size=12,
    samples_in_flight=3,
    lengths=(2, 40, 150, 300, 400),
    tokens_per_s=400.0,
    partial_rollout=True,
)
"""There are fewer groups than workers, and a group is larger than a worker's places: its samples are lent."""


def write_settings(
    folder: Path,
    run: str,
    load: Load = LIGHT,
    *,
    poisoned: Sequence[int] = (),
    prompts: int = 100_000,
) -> None:
    """The settings and prompts of a run. `poisoned` are rows of task `math` that kill their worker."""
    payloads = payloads_in(folder)
    tables = [f'run = "{run}"', "[payloads]", f"min_bytes = {payloads.min_bytes}"]
    tables += [f'url = "{payloads.url}"'] if payloads.url else []
    tables += ["[worker]", 'engine = "faults.engine.ChaosEngine"']
    tables += [f"samples_in_flight = {load.samples_in_flight}", "grace_s = 1.0", "judge_processes = 1"]
    tables += [f"options = {{ lengths = {list(load.lengths)}, tokens_per_s = {load.tokens_per_s} }}"]
    for task, groups in load.offline_batch.items():
        tables += [f"[tasks.{task}]", "offline = true", f"batch_groups = {groups}", f"group_size = {load.group_size}"]
        tables += ["batches.max_uncheckpointed_steps = 20"]
    for task, groups in load.batch.items():
        tables += [f"[tasks.{task}]", f'prompts = "{task}.jsonl"', f"batch_groups = {groups}"]
        tables += [
            f"group_size = {load.group_size}",
            f"staleness.partial_rollout = {str(load.partial_rollout).lower()}",
        ]
        tables += [
            f"max_staleness = {load.max_staleness}",
            f"limits.lease_s = {load.lease_s}",
            "batches.max_uncheckpointed_steps = 20",
        ]
        bad = set(poisoned) if task == "math" else set()
        lines = [
            orjson.dumps({"prompt": f"{'poison' if row in bad else task} {row}", "answer": "x"})
            for row in range(prompts)
        ]
        (folder / f"{task}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / SETTINGS_FILE).write_text("\n".join(tables) + "\n")
    for name in ("history", "logs", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)


class Role:
    """One process of a role; `start` starts it again after it has ended."""

    def __init__(self, name: str, main: Callable[..., None], *args: object) -> None:
        self.name = name
        self._main = main
        self._args = args
        self._process: ForkServerProcess | None = None
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; a stopped one is alive."""
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process."""
        self.starts += 1
        self._process = FORKS.Process(target=_main, args=(self.name, self._main, *self._args), daemon=True)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within `timeout_s`."""
        if self._process is not None:
            self._process.join(timeout_s)
        return not self.alive


def _main(name: str, main: Callable[..., None], *args: object) -> None:
    """The start of every role's process: its output goes to a log, and its own exceptions too."""
    folder = next(arg.folder if isinstance(arg, Launch) else arg for arg in args if isinstance(arg, Launch | Path))
    log = os.open(folder / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(process)d %(message)s", force=True)
    try:
        main(*args)
    except Exception:  # noqa: BLE001 - it goes to the log, and the process ends as it would have
        traceback.print_exc()
        sys.exit(1)


def produce(folder: Path, url: str, queue_url: str = "") -> None:
    """`rollq produce`. `queue_url` is the URL of the queue, unless it is on the buffer's server."""
    _run_command(["produce", str(folder / SETTINGS_FILE)], url, queue_url)


def produce_ticks(folder: Path, url: str, ticks: int) -> None:
    """`rollq produce`, which ends after a few turns of its loop."""
    from rollq.cli.run_location import RunLocation, open_run
    from rollq.cli.settings.file import load_settings
    from rollq.producer.producer import Producer
    from rollq.producer.run import open_prompts, run_producer

    os.environ["ROLLQ_REDIS_URL"] = url
    settings, stop, left = load_settings(folder / SETTINGS_FILE), threading.Event(), iter(range(ticks - 1))
    tick = Producer.tick

    def counted_tick(self: Producer) -> None:
        tick(self)
        if next(left, None) is None:
            stop.set()

    Producer.tick = counted_tick  # type: ignore[method-assign]
    with open_prompts(settings.produced_tasks(), settings.evaluations) as prompts, open_run(settings, stop) as buffer:
        queue = RunLocation.from_settings(settings).queue()
        run_producer(buffer, queue, prompts, settings.producer, seed=settings.seed, stop=stop)


def insert(folder: Path, url: str) -> None:
    """An importer: it inserts what an expert has made, until SIGTERM."""
    from rollq.cli.run_location import open_run
    from rollq.cli.settings.file import load_settings

    os.environ["ROLLQ_REDIS_URL"] = url
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    with open_run(load_settings(folder / SETTINGS_FILE), stop) as buffer:
        keep_inserting(History(folder / "history", "importer"), buffer, stop)


def sweep(folder: Path, url: str) -> None:
    """What any role may do: take groups back, expire, and look at the run as a monitor does."""
    from rollq.cli.settings.file import load_settings

    settings = load_settings(folder / SETTINGS_FILE)
    with Buffer.connect(url, settings.run, payloads=settings.payloads) as buffer:
        for task in buffer.tasks():
            buffer.reap(task)
            buffer.expire(task)
            buffer.collect(task)
            buffer.counts(task)
        buffer.workers()


def work(folder: Path, url: str, name: str, queue_url: str = "") -> None:
    """`rollq work`, which writes a history of its leases and results. Its larger frames are payloads."""
    payload.MOST_INLINE_BYTES = INLINE_BYTES
    record_worker(History(folder / "history", name))
    _run_command(["work", str(folder / SETTINGS_FILE), "--name", name], url, queue_url)


def work_for_others(folder: Path, url: str, name: str) -> None:
    """`rollq work` that leases no groups: it makes samples of other workers' groups."""
    from rollq.workers.groups.intake import Intake
    from rollq.workers.wake_signals import POLL_S

    async def nothing(_: Intake) -> tuple[int, float]:
        return 0, POLL_S

    Intake._allow = nothing  # type: ignore[assignment,method-assign]
    work(folder, url, name)


def train(launch: Launch, rank: int) -> None:
    """One rank of the trainer."""
    trainer.run_rank(launch, rank)


def _run_command(arguments: list[str], url: str, queue_url: str = "") -> None:
    from rollq.cli.main import main

    os.environ["ROLLQ_REDIS_URL"] = url
    if queue_url:
        os.environ["ROLLQ_QUEUE_URL"] = queue_url
    sys.argv = ["rollq", *arguments]
    main()

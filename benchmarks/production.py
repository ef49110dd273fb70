"""Synchronous and asynchronous production: how close each comes to max(generation, training), and its length bias.

A real server, with a producer and a worker as processes. The simulated engine replays lengths, and the trainer only
waits. Generation is bounded by the worker's slots: a batch takes at least the total time of its answers divided by the
slots. The bound of a step is the larger of that and the training time, because both can run at once.
"""

import csv
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson

from benchmarks.results import Result
from benchmarks.world import TASK, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.wire.prompts import decode_prompt
from rollq.workers.engines.simulated import length_of

LENGTHS = Path("../shared/data/azure_llm_conv.csv")
"""Generated tokens of an hour of conversations (Azure LLM inference trace 2023), used if the file exists."""
SLOTS = 32
TOKENS_PER_S = 1000.0
PROMPTS_PER_GROUP = 40
"""Prompts in the file per trained group: more than are admitted."""
SHARES = {"a tenth": 0.1, "half": 0.5, "as long as all": 1.0}
STRATEGIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "sync": ("sync", {"max_staleness": 0}),
    "async": ("async", {"max_staleness": 1}),
    "async_expiring": ("async", {"max_staleness": 1, "stragglers": "expire"}),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one strategy at one training time.

    `trained` are the lengths in tokens of trained groups, `admitted` the lengths of the same number of admitted groups.
    """

    step_s: float
    bound_s: float
    trained: tuple[int, ...]
    admitted: tuple[int, ...]
    expired: int

    @property
    def closeness(self) -> float:
        """The bound as a share of the time that a step took; 1 is optimal."""
        return self.bound_s / self.step_s

    def bias(self, percentile: float | None = None) -> float:
        """The share by which trained answers are longer than admitted answers, on average or at a percentile."""
        if percentile is None:
            return float(np.mean(self.trained) / np.mean(self.admitted)) - 1
        return float(np.percentile(self.trained, percentile) / np.percentile(self.admitted, percentile)) - 1


def measure(quick: bool) -> list[Result]:
    """One result per training time: bound over step time, and the length bias, of each strategy."""
    lengths = read_lengths()
    batch_groups, steps = (32, 3) if quick else (512, 10)
    with server() as running:
        return [
            _row(running.url, share_name, lengths, batch_groups, steps)
            for share_name in list(SHARES)[: 1 if quick else None]
        ]


def _row(url: str, share_name: str, lengths: Sequence[int], batch_groups: int, steps: int) -> Result:
    """The result of the asynchronous strategy at one training time, with the others in its details."""
    share = SHARES[share_name]
    outcomes = {
        name: run_one(url, f"{share}-{number}", strategy, rules, lengths, share, batch_groups, steps)
        for number, (name, (strategy, rules)) in enumerate(STRATEGIES.items())
    }
    wanted = outcomes["async"]
    details = {"step_s": wanted.step_s, "bound_s": wanted.bound_s}
    for name, outcome in outcomes.items():
        details |= {
            f"{name}_share": outcome.closeness,
            f"{name}_mean_bias_percent": 100 * outcome.bias(),
            f"{name}_p99_bias_percent": 100 * outcome.bias(99),
            f"{name}_expired_groups": outcome.expired,
        }
    return Result(
        name=f"production-{share:g}",
        what=f"asynchronous production, training takes {share_name} of generation: the bound over what a step takes",
        unit="share",
        target=0.9,
        better="higher",
        values=(wanted.closeness,),
        details=details,
    )


def read_lengths() -> tuple[int, ...]:
    """Lengths of answers in tokens: from the trace, or drawn from a similar log-normal (mean 211, at most 1000)."""
    if LENGTHS.exists():
        with LENGTHS.open() as file:
            return tuple(int(row["GeneratedTokens"]) for row in csv.DictReader(file))
    drawn = np.random.default_rng(0).lognormal(5.0, 0.85, 20_000)
    return tuple(int(length) for length in np.clip(drawn, 7, 1000))


def run_one(
    url: str,
    name: str,
    strategy: str,
    rules: Mapping[str, object],
    lengths: Sequence[int],
    share: float,
    batch_groups: int,
    steps: int,
) -> Outcome:
    """Train `steps` steps. The first two do not count, because generation had no head start before them."""
    generation_s = batch_groups * float(np.mean(lengths)) / TOKENS_PER_S / SLOTS
    run = f"production-{name}"
    task = TaskRules.model_validate({"batch_groups": batch_groups, "group_size": 1, **rules})
    with TemporaryDirectory(prefix="rollq-bench-") as folder, Buffer.connect(url, run) as buffer:
        write_prompts(Path(folder), PROMPTS_PER_GROUP * batch_groups * steps)
        write_settings(Path(folder), url, run, strategy, task, lengths)
        with roles(Path(folder)):
            times_s, trained = train(buffer, task, steps, share * generation_s)
            counts = buffer.counts(TASK)
        admitted = [admitted_length(buffer, group_id, lengths) for group_id in range(1, len(trained) + 1)]
    return Outcome(
        step_s=(times_s[-1] - times_s[1]) / (steps - 2),
        bound_s=max(generation_s, share * generation_s),
        trained=tuple(trained),
        admitted=tuple(admitted),
        expired=int(counts.progress.get("expired", 0)),
    )


def write_prompts(folder: Path, count: int) -> None:
    """Write a file of distinct prompts."""
    prompts = [orjson.dumps({"prompt": "?", "prompt_ids": [i // 1000, i % 1000]}) for i in range(count)]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(prompts))


def write_settings(folder: Path, url: str, run: str, strategy: str, rules: TaskRules, lengths: Sequence[int]) -> None:
    """Write the `rollq.toml` of producer and worker."""
    (folder / "rollq.toml").write_text(
        f"""
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.{TASK}]
prompts = "prompts.jsonl"
rows.answer_field = ""
judge = "benchmarks.production.judge"
batch_groups = {rules.batch_groups}
group_size = 1
max_staleness = {rules.max_staleness}
staleness.stragglers = "{rules.stragglers}"
batches.max_uncheckpointed_steps = {rules.max_uncheckpointed_steps}
max_tokens = 2000
[producer]
strategy = "{strategy}"
groups_per_job = 1
[worker]
engine = "simulated"
samples_in_flight = {SLOTS}
grace_s = 0
[worker.options]
by_prompt = true
tokens_per_s = {TOKENS_PER_S}
lengths = {list(lengths)}
"""
    )


def judge(prompt: object, sample: object) -> float:
    """Give every sample the same reward: nothing is learned here."""
    return 0.0


@contextmanager
def roles(folder: Path) -> Iterator[None]:
    """Run a producer and a worker as processes."""
    running = []
    try:
        for role in ("produce", "work"):
            command = [sys.executable, "-m", "rollq.cli.main", role, str(folder / "rollq.toml")]
            running.append(subprocess.Popen(command, stderr=(folder / f"{role}.log").open("wb")))
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


def train(buffer: Buffer, rules: TaskRules, steps: int, train_s: float) -> tuple[list[float], list[int]]:
    """Act as the trainer: claim, wait, publish, commit. Returns the end time of each step and the trained lengths."""
    buffer.create_run()
    buffer.register_task(TASK, rules)
    held = buffer.begin_epoch(trainer_id="bench", launch_id="bench", from_step=0, uri="", digest="0")
    times_s: list[float] = []
    trained: list[int] = []
    with buffer.events() as events:
        for step in range(1, steps + 1):
            while not isinstance(claimed := buffer.claim(held, step, {TASK: rules.batch_groups}), Claimed):
                events.wait(1.0)
            trained += [group.tokens for group in claimed.groups]
            time.sleep(train_s)
            buffer.publish(held, step, uri="", digest=str(step))
            buffer.commit(held, step)
            times_s.append(time.monotonic())
    return times_s, trained


def admitted_length(buffer: Buffer, group_id: int, lengths: Sequence[int]) -> int:
    """Length of the answer to an admitted prompt. Trained groups are still there, since nothing is checkpointed."""
    stored = buffer.client.hget(task_keys(buffer.run, TASK).group(group_id), "prompt")
    assert isinstance(stored, bytes)
    return length_of(np.array(decode_prompt(stored).ids, np.int32), lengths)

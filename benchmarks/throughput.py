"""Tokens per second through rollq against the same vLLM driven directly, with the same prompts.

Through rollq: producer, worker with vLLM and server as processes, tickets, leases, frames, claims and commits, and the
same weights all the time. Directly: all requests of as many groups at once, over and over. The sides take turns.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson

from benchmarks.results import Result
from benchmarks.world import QUESTION, TASK, server
from rollq.buffer.replay import Buffer
from rollq.buffer.settings import TaskRules
from rollq.buffer.values import Claimed
from rollq.buffer.weights import locate_weights
from rollq.cli.tiny import make_model, make_tokenizer, save
from rollq.workers.engine import Sampling
from rollq.workers.tokenizer import HfTokenizer

GROUP_SIZE = 8
IN_FLIGHT = 32
MAX_TOKENS = 256
STEPS = 60
EOS_IDS = (1, 2, 3, 4)
"""One token in 64 ends an answer, so that groups are of different lengths and do not go on in waves."""
TEMPERATURE = 1.0
WARM_UP_S = 5.0
ENGINE_ARGS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20, "max_num_seqs": 256}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(quick: bool) -> list[Result]:
    """Rounds of both sides; the ratio of each."""
    os.environ.update(ENVIRONMENT)
    seconds, rounds = (5.0, 1) if quick else (30.0, 3)
    with TemporaryDirectory(prefix="rollq-bench-") as name:
        folder = Path(name)
        write_files(folder)
        pairs = [(directly(folder, seconds), through_rollq(folder, index, seconds)) for index in range(rounds)]
    ratios = tuple(rollq / direct for direct, rollq in pairs)
    return [
        Result(
            name="throughput",
            what=f"vLLM through rollq over vLLM driven directly, {IN_FLIGHT} groups of {GROUP_SIZE} in flight",
            unit="share",
            target=0.9,
            better="higher",
            values=ratios,
            details={
                "direct_tokens_per_s": float(np.median([direct for direct, _ in pairs])),
                "rollq_tokens_per_s": float(np.median([rollq for _, rollq in pairs])),
            },
        )
    ]


def write_files(folder: Path) -> None:
    """The model and the prompts."""
    model = make_model(258, 0, head_dim=32)
    model.generation_config.eos_token_id = list(EOS_IDS)
    save(folder / "model", model, make_tokenizer())
    prompts = [orjson.dumps({"prompt": f"{number}. {QUESTION.format(number % 97)}"}) for number in range(20_000)]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(prompts))


def directly(folder: Path, seconds: float) -> float:
    """Tokens per second of `AsyncLLM`, with `IN_FLIGHT` groups at any time."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollq.workers.engines.vllm_api import sampling_parameters

    tokenizer = HfTokenizer(folder / "model")
    prompts = [tokenizer.encode(orjson.loads(line)["prompt"]) for line in (folder / "prompts.jsonl").open("rb")]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder / "model"),
            dtype="float32",
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            scheduling_policy="priority",
            disable_log_stats=True,
            enable_chunked_prefill=False,  # as in the worker, on the CPU
            **ENGINE_ARGS,
        )
    )
    numbers, made = count(), [0]

    async def sample(prompt: list[int]) -> None:
        number = next(numbers)
        parameters = sampling_parameters(Sampling(MAX_TOKENS, TEMPERATURE, seed=number), MAX_TOKENS, list(EOS_IDS))
        async for output in engine.generate({"prompt_token_ids": prompt}, parameters, f"request-{number}"):
            made[0] += len(output.outputs[0].token_ids)

    async def groups(first: int) -> None:
        for index in count(first, IN_FLIGHT):
            await asyncio.gather(*(sample(prompts[index % len(prompts)]) for _ in range(GROUP_SIZE)))

    async def run() -> float:
        running = [asyncio.create_task(groups(first)) for first in range(IN_FLIGHT)]
        await asyncio.sleep(WARM_UP_S)
        before, started_s = made[0], time.monotonic()
        await asyncio.sleep(seconds)
        rate = (made[0] - before) / (time.monotonic() - started_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return rate

    try:
        return asyncio.run(run())
    finally:
        engine.shutdown()


def through_rollq(folder: Path, index: int, seconds: float) -> float:
    """Tokens per second of batches that were claimed and committed, with a worker that has as many groups in flight."""
    rules = TaskRules(
        batch_groups=IN_FLIGHT, group_size=GROUP_SIZE, max_staleness=STEPS, resume="fresh", stragglers="expire"
    )
    with server() as running, Buffer.connect(running.url, f"throughput-{index}") as buffer:
        buffer.create_run()
        buffer.register_task(TASK, rules)
        weights = locate_weights(buffer, folder / "model")
        held = buffer.begin_epoch(
            trainer_id="bench", launch_id="bench", from_step=0, uri=weights.uri, digest=weights.digest
        )
        write_config(folder, buffer.run, running.url, rules)
        with roles(folder) as running_roles, buffer.events() as events:
            tokens, begun_s, last_s = 0, 0.0, 0.0
            for step in count(1):
                while not isinstance(claimed := buffer.claim(held, step, {TASK: IN_FLIGHT}), Claimed):
                    events.wait(1.0)
                    if any(role.poll() is not None for role in running_roles):
                        raise RuntimeError((folder / "work.log").read_text()[-4000:])
                buffer.fetch(claimed.groups)
                buffer.commit(held, step)
                last_s = time.monotonic()
                if step == 1:
                    first_s = last_s
                if not begun_s:
                    begun_s = last_s if last_s - first_s >= WARM_UP_S else 0.0
                    continue
                tokens += sum(group.tokens for group in claimed.groups)
                if last_s - begun_s >= seconds:
                    break
    return tokens / (last_s - begun_s)


def write_config(folder: Path, run: str, url: str, rules: TaskRules) -> None:
    """`rollq.toml` of producer and worker."""
    arguments = ", ".join(f"{name} = {orjson.dumps(value).decode()}" for name, value in ENGINE_ARGS.items())
    (folder / "rollq.toml").write_text(
        f"""
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.{TASK}]
prompts = "prompts.jsonl"
answer_field = ""
judge = "benchmarks.throughput.judge"
batch_groups = {rules.batch_groups}
group_size = {rules.group_size}
max_staleness = {rules.max_staleness}
stragglers = "{rules.stragglers}"
resume = "{rules.resume}"
max_tokens = {MAX_TOKENS}
temperature = {TEMPERATURE}
[producer]
over_sample = 1.0
[worker]
engine = "vllm"
groups_in_flight = {IN_FLIGHT}
grace_s = 0
[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ {arguments} }}
"""
    )


def judge(prompt: object, sample: object) -> float:
    """Nothing is learned here."""
    return 0.0


@contextmanager
def roles(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A producer and a worker."""
    running = []
    try:
        for role in ("produce", "work"):
            command = [sys.executable, "-m", "rollq.cli.main", role, str(folder / "rollq.toml")]
            running.append(subprocess.Popen(command, stderr=(folder / f"{role}.log").open("wb")))
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)

"""Judges with processes of their own, and judges that behave badly."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import numpy as np

from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.rewards import Credit, Verdict


def sample(text: str) -> Sample:
    return Sample(segments=(), status=SampleStatus.COMPLETED, text=text)


def question(answer: Any = "42") -> Prompt:
    return Prompt("What is it?", answer=answer, metadata={"level": 3})


@asynccontextmanager
async def made(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 60,
    isolate: bool = False,
    processes: int = 2,
) -> AsyncIterator[Judge]:
    """A judge; one of this module by the function's name."""
    apart = JudgePool(processes)
    path = f"support.judge_doubles.{name}" if name.endswith("_judge") else name
    judge = make_judge(path, options or {}, JudgeContext(timeout_s, apart, isolate))
    try:
        yield judge
    finally:
        await judge.close()
        await apart.close()


def verdicts(name: str, options: Mapping[str, Any], cases: Sequence[tuple[str, Any]]) -> list[Verdict]:
    """What the judge makes of (text, answer) pairs, all at the same time."""

    async def judge_all() -> list[Verdict]:
        async with made(name, options) as judge:
            return await asyncio.gather(*(judge.judge(question(answer), sample(text)) for text, answer in cases))

    return asyncio.run(judge_all())


def pid_judge(prompt: Prompt, judged: Sample) -> float:
    return float(os.getpid())


def two_parts(prompt: Prompt, judged: Sample) -> Mapping[str, float]:
    return {"one": 1.0, "other": -0.5}


def credit_judge(prompt: Prompt, judged: Sample) -> Credit:
    """What three turns earned."""
    return Credit({"right": 2.0}, turns=np.array([1.0, 0.5, -1.0]))


async def async_judge(prompt: Prompt, judged: Sample) -> float:
    return 1.0


def copied_judge(prompt: Prompt, judged: Sample) -> Mapping[str, float]:
    """1 for what has come over as it was."""
    whole = judged.segments[0].logprobs.tolist() == [-0.5] and judged.segments[0].versions[0].version == 7
    return {"prompt": float(prompt == question({"deep": [1, "x"]})), "sample": float(whole), "text": len(judged.text)}


PREPARED: list[str] = []


def executing_judge(prompt: Prompt, sample: Sample) -> float:
    """Runs the model's text as code, with what was prepared of prompts. Gives the number that the code leaves."""
    names: dict[str, Any] = {"prepared": PREPARED}
    exec(sample.text, names)  # noqa: S102 - the fault that sealed processes are for
    return float(names["reward"])


executing_judge.prepare = lambda prompt: PREPARED.append(prompt.answer)  # type: ignore[attr-defined]


def burning_judge(prompt: Prompt, judged: Sample) -> float:
    until_s = time.monotonic() + float(judged.text)
    while time.monotonic() < until_s:
        sum(range(1000))
    return 1.0


def endless_judge(prompt: Prompt, judged: Sample) -> float:
    """Holds the interpreter, and wants to hear of no signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(1000)
    return 0.0


def announced_judge(prompt: Prompt, judged: Sample) -> float:
    """Says that it begins, and never ends."""
    os.write(2, b"endless\n")
    return endless_judge(prompt, judged)


def spawning_judge(prompt: Prompt, judged: Sample) -> float:
    """Starts a process, with the file that the text names as its output, and never ends."""
    with open(judged.text, "wb") as output:
        subprocess.Popen(["sh", "-c", "echo begun; exec sleep 1000"], stdout=output)
    return endless_judge(prompt, judged)


def crashing_judge(prompt: Prompt, judged: Sample) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def exiting_judge(prompt: Prompt, judged: Sample) -> float:
    os._exit(4)


def forking_judge(prompt: Prompt, judged: Sample) -> Mapping[str, float]:
    """Leaves a process behind that has left its group."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
    return {"own": os.getpid(), "child": child}


class TwoWords(Exception):
    """Cannot be made again from its message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class NoWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def bad_judge(prompt: Prompt, judged: Sample) -> Any:
    """What goes wrong is the text."""

    def leave() -> NoReturn:
        sys.exit("gone")

    def speechless() -> NoReturn:
        raise NoWords

    def two_words() -> NoReturn:
        raise TwoWords("one", "other")

    def surrogate() -> NoReturn:
        raise ValueError("\ud800")

    def deep() -> Any:
        return deep()

    def printing() -> float:
        print("noise")
        os.write(1, b"more noise")
        return 1.0

    kinds: dict[str, Callable[[], Any]] = {
        "leave": leave,
        "speechless": speechless,
        "two words": two_words,
        "surrogate": surrogate,
        "deep": deep,
        "function": lambda: leave,
        "nan": lambda: float("nan"),
        "printing": printing,
        "input": lambda: len(sys.stdin.read()),
    }
    return kinds[judged.text]()


def greedy_judge(prompt: Prompt, sample: Sample) -> float:
    """Reserves as many bytes as the text says, without touching them."""
    return float(np.zeros(int(sample.text), np.uint8).size)

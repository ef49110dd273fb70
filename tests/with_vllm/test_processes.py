"""Whatever is killed, and whenever: none of vLLM's processes is left, and none of its shared memory."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import psutil
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.workers.engines.protocol import EngineDead
from rollq.workers.engines.vllm.engine import VllmEngine
from rollq.workers.engines.vllm.guard import ProcessGuard
from rollq.workers.engines.vllm.process import VllmProcess
from rollq.workers.engines.vllm.settings import VllmSettings
from rollq.workers.engines.vllm.watchdog import marked, shared_memory
from support.recorded_run import role
from support.vllm_run import ENGINE_ARGS, cpu_environment, make_qwen3
from support.waiting import PATIENCE_S, wait_until, wait_while_alive

pytest_plugins = "support.vllm_fixtures"

CORE_AND_WORKERS = 3
CACHE_BYTES = ENGINE_ARGS["kv_cache_memory_bytes"]
CONFIG = f"""
run = "stopped"

[tasks.parity]
prompts = "prompts.jsonl"
judge = "exact_match"
batch_groups = 1
group_size = 2
max_tokens = 8

[worker]
engine = "vllm"

[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ enforce_eager = true, kv_cache_memory_bytes = {CACHE_BYTES} }}
"""


class Killed:
    """A worker's process with an engine, whose processes the test looks at and kills."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._log = log
        self._ended: set[str] = set()

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def mark(self) -> str | None:
        """The mark of the engine that was started last: the watchdog's last argument."""
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:  # it has just ended
                continue
            if len(words) > 2 and words[-3].endswith("watchdog.py") and words[-1] not in self._ended:
                return str(words[-1])
        return None

    def until_it_has(self, processes: int) -> str:
        """The mark of an engine once it has so many processes."""

        def has_them() -> bool:
            mark = self.mark()
            return mark is not None and len(marked(mark)) >= processes

        wait_while_alive(has_them, {"worker": self.process}, lambda _: self.text())
        mark = self.mark()
        assert mark is not None
        return mark

    def kill(self, victim: str, mark: str) -> None:
        """SIGKILL to one process of the engine, or to the worker; waits until all of the engine's have ended."""
        segments = shared_memory(marked(mark))
        os.kill(self._pid(victim, mark), signal.SIGKILL)
        self.until_gone(mark, segments, f"kill -9 of the {victim}")

    def until_gone(self, mark: str, segments: set[str], why: str) -> None:
        began_s = time.monotonic()
        self._ended.add(mark)
        wait_until(lambda: not marked(mark), otherwise=lambda: marked(mark))
        print(f"{why}: the engine's processes ended after {time.monotonic() - began_s:.1f} s")
        wait_until(lambda: not left(segments), otherwise=lambda: left(segments))

    def _pid(self, victim: str, mark: str) -> int:
        """The victim's process; waits until it has begun. Other processes may come and go while vLLM starts."""
        if victim == "worker":
            return self.process.pid
        found: list[int] = []

        def begun() -> bool:
            cores = children(self.process.pid, marked(mark))
            found[:] = cores if victim == "core" else [pid for core in cores for pid in children(core, marked(mark))]
            return bool(found)

        wait_while_alive(begun, {"worker": self.process}, lambda _: self.text())
        return max(found)


def children(parent: int, pids: Collection[int]) -> list[int]:
    """Those of `pids` that are children of `parent`."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).ppid() == parent:
                found.append(pid)
    return found


def left(segments: set[str]) -> list[str]:
    return [segment for segment in segments if Path(segment).exists()]


@pytest.fixture
def killed(models: list[Path], tmp_path: Path) -> Iterator[Killed]:
    """A worker's process that has begun to start an engine with two engine workers."""
    log = tmp_path / "engine.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "support.killed_engine", str(models[0])]
        environment = {**os.environ, **cpu_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    with process:
        yield Killed(process, log)
        process.kill()


@pytest.mark.parametrize(
    ("victim", "processes"),
    [
        ("worker", 1),
        pytest.param("worker", CORE_AND_WORKERS, marks=pytest.mark.slow),
        ("core", CORE_AND_WORKERS),
        pytest.param("engine worker", CORE_AND_WORKERS, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_while_the_engine_starts(killed: Killed, victim: str, processes: int) -> None:
    killed.kill(victim, killed.until_it_has(processes))
    assert killed.process.wait(PATIENCE_S) != 0


def test_a_worker_that_is_asked_to_stop_while_its_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path / "model", seed=0)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": ""}\n')
    (tmp_path / "rollq.toml").write_text(CONFIG)
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as stack:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        stack.enter_context(role(tmp_path, "produce", "rollq.toml"))
        worker = Killed(stack.enter_context(role(tmp_path, "work", "rollq.toml")), tmp_path / "work-rollq.toml.log")
        mark = worker.until_it_has(1)
        segments = shared_memory(marked(mark))
        worker.process.terminate()
        worker.until_gone(mark, segments, "SIGTERM to the worker")
        assert worker.process.wait(PATIENCE_S) == 0, worker.text()
    assert "Traceback" not in worker.text()


def test_a_start_that_is_cancelled_leaves_no_process(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has two processes, one after the other; the thread that starts them cannot be stopped."""
    started: list[subprocess.Popen[bytes]] = []

    def start_vllm(settings: VllmSettings, guard: ProcessGuard) -> None:
        with guard.marking():
            for _ in range(2):
                started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]))
                started[-1].wait()
        raise ConfigError("vLLM's process died")

    async def scenario() -> None:
        start = asyncio.create_task(VllmProcess.start(VllmSettings(model=models[0]), print))
        while not started:
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    monkeypatch.setattr("rollq.workers.engines.vllm.process.start_vllm", start_vllm)
    asyncio.run(scenario())
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_an_engine_that_fails_after_vllm_has_started_closes_it(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = AsyncMock(llm=MagicMock())
    process.llm.vllm_config.model_config.max_model_len = 4096
    process.name_version.side_effect = EngineDead("it died")
    monkeypatch.setattr(VllmProcess, "start", AsyncMock(return_value=process))
    engine = VllmEngine(VllmSettings(model=models[0]))
    with pytest.raises(EngineDead, match="it died"):
        asyncio.run(engine.start())
    process.close.assert_awaited_once()

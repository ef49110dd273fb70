"""A real `vllm` server in a process of its own, and what an engine over some of them is waited for."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil

from rollq.workers.engines.openai.engine import OpenAIEngine
from rollq.workers.engines.vllm.extension import LoadExtension
from support.sglang_server import SglangServer
from support.vllm_run import CONTEXT_TOKENS, ENGINE_ARGS, cpu_environment
from support.waiting import PATIENCE_S


class VllmServer:
    """Serves the model in `folder` on a port of loopback, and takes other weights. `more` arguments are vLLM's."""

    def __init__(self, folder: Path, port: int, log: Path, *more: str) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--logprobs-mode", "processed_logprobs", "--max-model-len", str(CONTEXT_TOKENS), "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(ENGINE_ARGS["kv_cache_memory_bytes"]), "--no-enable-chunked-prefill"),
            *("--worker-extension-cls", f"{LoadExtension.__module__}.{LoadExtension.__qualname__}"),
            *more,
        ]
        self.start()

    def start(self) -> None:
        """Begin to serve, or again after a kill."""
        with self._log.open("ab") as log:
            environment = {**os.environ, **cpu_environment(), "VLLM_SERVER_DEV_MODE": "1"}
            self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log, process_group=0)

    def wait(self) -> None:
        """Until it answers."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            try:
                with urllib.request.urlopen(self.url.replace("/v1", "/health"), timeout=5):
                    return
            except OSError:
                time.sleep(0.1)

    def engine_pid(self) -> int:
        """Of the process that computes."""
        for child in psutil.Process(self.process.pid).children():
            if "EngineCore" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError(self._log.read_text())

    def kill(self) -> None:
        """SIGKILL to the server and its engine."""
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()


async def until_they_are(engine: OpenAIEngine, out: list[bool]) -> None:
    while [not server.serving for server in engine._servers.servers] != out:
        await asyncio.sleep(0.05)


async def until_it_answers(engine: OpenAIEngine, server: "VllmServer | SglangServer") -> None:
    """Until a request is under way that the server has given tokens."""
    while not any(call.tokens.ids and call.tokens.url == server.url for call in engine._gate.calls):
        assert engine._gate.calls
        await asyncio.sleep(0.005)

"""A real SGLang server in a separate process, on the CPU."""

import os
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from support.vllm_run import CONTEXT_TOKENS
from support.waiting import PATIENCE_S

PYTHON = os.environ.get("ROLLQ_SGLANG_PYTHON")
"""The interpreter of an environment with SGLang."""
STAND_INS = Path(__file__).parent.parent / "with_sglang" / "stand_ins"


class SglangServer:
    """Serves the model in `folder` on a port of loopback. `more` arguments are SGLang's."""

    def __init__(self, folder: Path, port: int, log: Path, *more: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [
            *(str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--dtype", "float32", "--max-total-tokens", str(16 * CONTEXT_TOKENS), "--mem-fraction-static", "0.05"),
            *("--disable-cuda-graph", "--disable-overlap-schedule", "--incremental-streaming-output"),
            *more,
        ]
        self.start()

    def start(self) -> None:
        """Begin to serve, or again after a kill."""
        own = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(STAND_INS),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("ab") as log:
            environment = {**os.environ, **own}
            self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log, process_group=0)

    def wait(self) -> None:
        """Until it answers."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to the server and its processes."""
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def __enter__(self) -> "SglangServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()

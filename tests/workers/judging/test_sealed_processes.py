"""Judge processes that run a model's text as code: no call gets out, and none leaves anything to the next."""

import asyncio
import os
import re
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError

from rollq.buffer.common.sealing import probe
from rollq.buffer.common.sealing.probe import sealing_available
from rollq.buffer.common.sealing.process import Means
from rollq.buffer.errors import ConfigError
from rollq.workers.groups.task_settings import JudgeSettings
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgeFailed, JudgePool
from rollq.workers.judging.rewards import Answer, Credit, Verdict
from support.hostile_graders import entry, grade, grade_entry
from support.judge_doubles import question, sample
from support.waiting import PATIENCE_S, wait_until

CAN: Final = [means for means, reason in sealing_available().items() if not reason]

EXECUTING: Final = "support.judge_doubles.executing_judge"
ATTACKS: Final = {
    "open(given[0], 'w')": "PermissionError",
    "open('/etc/passwd')": "PermissionError|FileNotFoundError",
    "import os; open(f'/proc/{os.getppid()}/environ')": "PermissionError|FileNotFoundError",
    "import os; open(f'/proc/{given[1]}/environ')": "PermissionError|FileNotFoundError",
    "import socket; socket.create_connection(('127.0.0.1', given[2]))": "PermissionError",
    "import os\nwhile True: os.fork()": "PermissionError",
    "import threading\nwhile True: threading.Thread(target=input).start()": "can't start new thread",
    "import subprocess; subprocess.run(['true'])": "PermissionError",
    "import os; os.kill(given[1], 9)": "PermissionError",
    "import os; os.kill(os.getppid(), 9)": "PermissionError",
    "import os; os.killpg(0, 9)": "PermissionError",
    "kept = [bytearray(1 << 26) for _ in range(1000)]": "MemoryError.*a judge may use 1024 MiB",
    "import mmap\nkept = [mmap.mmap(-1, 1 << 28) for _ in range(100)]": "Errno 12",
    "import ctypes; ctypes.string_at(0)": "its process died of SIGSEGV",
    "import os; os._exit(3)": "its process ended with exit code 3",
    "raise SystemExit": "SystemExit",
    "import os\nfor one in range(64):\n    try: os.write(one, b'[1]')\n    except OSError: pass": "other than",
}
"""Code, and what the sample fails with."""


def with_sealed(scene: Callable[[JudgePool], Coroutine[Any, Any, None]], means: Means, count: int = 1) -> None:
    async def run() -> None:
        pool = JudgePool(count)
        try:
            await scene(pool.sealed("support.hostile_graders", means=[means]))
        finally:
            await pool.close()

    asyncio.run(run())


async def failed(pool: JudgePool, *args: Any, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises((JudgeFailed, TimeoutError)) as caught:
        await pool.call(grade, *args, timeout_s=timeout_s)
    return str(caught.value)


def test_some_way_to_seal_is_there() -> None:
    assert CAN, "no test of sealed processes has run"


@pytest.mark.parametrize("means", CAN)
def test_no_attack_gets_out_and_the_next_call_works(means: Means, tmp_path: Path) -> None:
    async def scene(pool: JudgePool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for code, reason in ATTACKS.items():
                given = (str(tmp_path / "made"), os.getpid(), server.getsockname()[1])
                error = await failed(pool, code, *given)
                assert re.search(reason, error), (code, error)
                assert await pool.call(grade, "reward = 2.5", timeout_s=PATIENCE_S) == 2.5
        assert list(tmp_path.iterdir()) == []

    with_sealed(scene, means)


@pytest.mark.parametrize("means", CAN)
def test_a_call_that_hangs_is_killed_and_holds_up_no_other(means: Means) -> None:
    hanging = {
        "while True: pass": "took longer than 1 s",
        "import os, time; os.closerange(3, 64); time.sleep(10_000)": "took longer than 1 s",
        "import signal\nfor one in (2, 15): signal.signal(one, 1)\nwhile True: pass": "took longer than 1 s",
    }

    async def scene(pool: JudgePool) -> None:
        async def processes() -> list[Answer]:
            code = "import os; reward = os.getppid()"
            return await asyncio.gather(*(pool.call(grade, code, timeout_s=PATIENCE_S) for _ in range(2)))

        before = await processes()
        for code, reason in hanging.items():
            late = asyncio.create_task(failed(pool, code, timeout_s=1))
            for _ in range(3):
                assert await pool.call(grade, "reward = 1", timeout_s=PATIENCE_S) == 1
            assert await late == reason
        assert set(map(str, await processes())) == set(map(str, before))

    with_sealed(scene, means, count=2)


@pytest.mark.parametrize("means", CAN)
def test_no_call_changes_the_grader_for_the_next(means: Means) -> None:
    patch = "import support.hostile_graders as h; h.KEPT.append(1); h.grade = lambda *_: 9.0; reward = len(h.KEPT)"

    async def scene(pool: JudgePool) -> None:
        for _ in range(3):
            assert await pool.call(grade, patch, timeout_s=PATIENCE_S) == 1
        assert await pool.call(grade, "reward = 1.0", timeout_s=PATIENCE_S) == 1

    with_sealed(scene, means)


def test_what_runs_before_calls_is_kept_for_later_ones() -> None:
    async def scene(pool: JudgePool) -> None:
        async def made(index: int) -> Answer:
            return await pool.call(grade_entry, index, timeout_s=PATIENCE_S, before=(entry, [index]))

        assert [await made(index) for index in (7, 7, 8, 7)] == [11, 11, 22, 21]

    with_sealed(scene, CAN[0])


def test_a_sealed_process_prints_into_nothing_and_returns_rewards_of_every_form() -> None:
    async def scene(pool: JudgePool) -> None:
        assert await pool.call(grade, "print('x' * 1_000_000); reward = 1.0", timeout_s=PATIENCE_S) == 1
        assert await pool.call(grade, "reward = {'a': 1, 'b': 0.5}", timeout_s=PATIENCE_S) == {"a": 1, "b": 0.5}
        code = "from rollq.workers.judging.rewards import Credit; reward = Credit(tokens=[1.0] * 200_000)"
        credit = await pool.call(grade, code, timeout_s=PATIENCE_S)
        assert isinstance(credit, Credit)
        assert len(list(credit.tokens or ())) == 200_000
        flood = "import os\nfor one in range(3, 64):\n    try:\n        while os.write(one, b'1' * 65_536): pass\n"
        assert "its answer is larger than" in await failed(pool, f"{flood}    except OSError: pass")

    with_sealed(scene, CAN[0])


def test_sets_have_the_same_order_in_every_sealed_process() -> None:
    async def scene(pool: JudgePool) -> None:
        code = "import os; assert os.environ['PYTHONHASHSEED'] == '0'; reward = hash('x')"
        seen = await asyncio.gather(*(pool.call(grade, code, timeout_s=PATIENCE_S) for _ in range(4)))
        assert len(set(map(str, seen))) == 1

    with_sealed(scene, CAN[0], count=2)


def test_a_process_that_cannot_be_sealed_makes_no_call() -> None:
    async def scene() -> None:
        pool = JudgePool(1)
        try:
            for sealed in (pool.sealed("support.hostile_graders", means=[]), pool.sealed("no.such.module")):
                for _ in range(2):
                    assert "Error" in await failed(sealed, "reward = 1.0")
        finally:
            await pool.close()

    asyncio.run(scene())


def test_the_graders_of_reasoning_gym_run_no_code_of_the_model(tmp_path: Path) -> None:
    """Outside of the seal, they do."""
    from support.executing_graders import EXECUTING as EXECUTING_GRADERS
    from support.executing_graders import made, score, score_own

    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path('{canary}').touch()"

    async def scene() -> None:
        pool = JudgePool(1)
        try:
            sealed = pool.sealed("support.executing_graders")
            for name in EXECUTING_GRADERS:
                ready = (made, [name])
                with suppress(JudgeFailed):
                    assert float(str(await sealed.call(score, name, code, timeout_s=PATIENCE_S, before=ready))) < 1
                assert not canary.exists()
                assert await sealed.call(score_own, name, timeout_s=PATIENCE_S, before=ready) == 1
                with suppress(JudgeFailed):
                    await pool.call(score, name, code, timeout_s=PATIENCE_S)
                canary.unlink()
        finally:
            await pool.close()

    asyncio.run(scene())


def test_a_users_judge_may_be_sealed() -> None:
    async def scene() -> list[Verdict]:
        pool = JudgePool(1)
        judge = make_judge(
            "support.judge_doubles.executing_judge", {}, JudgeContext(PATIENCE_S, pool, isolate="sealed")
        )
        texts = (
            "reward = len(prepared)",
            "prepared.clear(); reward = 7",
            "reward = len(prepared)",
            "open('made', 'w')",
        )
        try:
            return [await judge.judge(question(), sample(text)) for text in texts]
        finally:
            await pool.close()

    *verdicts, refused = asyncio.run(scene())
    assert [verdict.reward for verdict in verdicts] == [1, 7, 3]
    assert "PermissionError" in str(refused.error)
    assert not Path("made").exists()


def test_the_setting_is_true_false_or_sealed() -> None:
    assert JudgeSettings(isolate_judge="sealed").isolate_judge == "sealed"
    with pytest.raises(ValidationError, match="should be False, True or 'sealed'"):
        JudgeSettings.model_validate({"isolate_judge": "seald"})


def test_a_system_that_cannot_seal_refuses_the_judge_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "sealing_available", lambda: dict.fromkeys(Means, "unshare: Operation not permitted"))
    with pytest.raises(
        ConfigError, match=r'isolate_judge = "sealed": this system cannot seal .* set it to true if you'
    ):
        make_judge("support.judge_doubles.executing_judge", {}, JudgeContext(1, JudgePool(1), isolate="sealed"))


@pytest.mark.parametrize("means", CAN)
def test_a_call_ends_with_its_parent(means: Means) -> None:
    """However the process between dies."""

    async def scene(pool: JudgePool) -> None:
        code = "import os; reward = os.getppid()"
        between = int(str(await pool.call(grade, code, timeout_s=PATIENCE_S)).partition(".")[0])
        endless = asyncio.create_task(failed(pool, "while True: pass"))
        children = Path(f"/proc/{between}/task/{between}/children")
        while not children.read_text():
            await asyncio.sleep(0.01)
        (call,) = map(int, children.read_text().split())
        os.kill(between, 9)
        assert "its process died of SIGKILL" in await endless
        await asyncio.to_thread(wait_until, lambda: not Path(f"/proc/{call}").exists())

    with_sealed(scene, means)

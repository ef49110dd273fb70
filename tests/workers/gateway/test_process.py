"""The process of a harness: whatever it starts ends with it, and with the worker."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rollq.buffer.common.child_processes import bare_python
from rollq.workers.gateway.harnesses import launcher
from rollq.workers.gateway.harnesses.enclosure import Enclosure, problem
from rollq.workers.gateway.harnesses.process import (
    HarnessFolder,
    HarnessProcess,
    remove_left_folders,
    sessions_folder,
)
from support.gateway_calls import run
from support.waiting import wait_until

ESCAPES = """
import os, sys, time
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()  # it leaves the process group, and its parent
    if os.fork() == 0:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("marker", os.getpid(), flush=True)
        os.write(tell, b"x")
        time.sleep(600)
    os._exit(0)
os.wait()
os.read(ready, 1)
{then}
"""
WORKER = """
import asyncio, sys, time
from pathlib import Path
from rollq.workers.gateway.harnesses.process import HarnessFolder, HarnessProcess

async def main():
    folder = HarnessFolder.make(None)
    await HarnessProcess.start([sys.executable, "-c", sys.argv[1]], folder, {}, b"", max_file_bytes=10**7)
    print(folder.root, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


KILLS_LAUNCHER = "os.kill(os.getppid(), 9)\ntime.sleep(600)"


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def escaped(folder: HarnessFolder) -> int:
    """The process that has left its group, once it has said so."""
    wait_until(lambda: folder.output.exists() and "marker" in folder.tail())
    return int(folder.tail().split()[-1])


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize("then", ["pass", "time.sleep(600)"], ids=["exits", "is ended"])
def test_what_has_left_the_process_group_ends_with_the_command(then: str) -> None:
    async def work() -> None:
        folder = HarnessFolder.make(None)
        process = await HarnessProcess.start(
            [sys.executable, "-c", ESCAPES.format(then=then)], folder, {}, b"", max_file_bytes=10**7
        )
        pid = await asyncio.to_thread(escaped, folder)
        if then == "pass":
            assert await process.wait() == 0
        await process.end()
        assert not runs(pid)
        folder.remove()
        assert not folder.root.exists()

    run(work)


def test_all_of_it_ends_with_a_worker_that_is_killed_and_its_folder_goes() -> None:
    program = ESCAPES.format(then="time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", WORKER, program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        folder = HarnessFolder(Path(worker.stdout.readline().strip()))
        pid = escaped(folder)
        worker.kill()
    wait_until(lambda: not runs(pid) and not folder.root.exists())


ENCLOSED = WORKER.replace('{}, b"", ', '{}, b"", enclosure=Enclosure(str(folder.root)), ').replace(
    "from pathlib", "from rollq.workers.gateway.harnesses.enclosure import Enclosure\nfrom pathlib"
)


@pytest.mark.parametrize("killed", ["worker", "launcher", "what makes the namespaces"])
def test_all_of_an_enclosed_command_ends_when_one_of_its_keepers_is_killed(killed: str) -> None:
    mine = HarnessFolder.make(None)
    found = problem(Enclosure(str(mine.root)))
    mine.remove()
    if found:
        pytest.skip(found)
    program = ESCAPES.format(then="time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", ENCLOSED, program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        folder = HarnessFolder(Path(worker.stdout.readline().strip()))
        escaped(folder)
        (launcher,) = psutil.Process(worker.pid).children()
        (maker,) = launcher.children()
        everybody = [launcher, *launcher.children(recursive=True)]
        assert len(everybody) == 5  # with the first process of the namespaces, the command, and one that has escaped
        os.kill({"worker": worker.pid, "launcher": launcher.pid}.get(killed, maker.pid), signal.SIGKILL)
        left = folder.root if killed == "worker" else Path("/nowhere")
        wait_until(lambda: not any(runs(process.pid) for process in everybody) and not left.exists())
        worker.kill()


LAST_THREAD = WORKER.replace(
    "    await asyncio.sleep(600)",
    """
    import ctypes, platform, threading
    while b"marker" not in folder.output.read_bytes():
        await asyncio.sleep(0.01)
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
""",
)


def test_all_of_it_ends_with_a_worker_that_still_has_a_thread() -> None:
    program = ESCAPES.format(then="time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", LAST_THREAD, program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        folder = HarnessFolder(Path(worker.stdout.readline().strip()))
        try:
            wait_until(lambda: not folder.root.exists())
            assert worker.poll() is None
        finally:
            worker.kill()


@pytest.mark.parametrize(
    "command", [["sh", "-c", "exec cat /dev/zero"], ["sh", "-c", "exec cat /dev/zero > file"]], ids=["output", "file"]
)
def test_a_file_cannot_grow_beyond_its_limit(command: list[str]) -> None:
    async def work() -> None:
        folder = HarnessFolder.make(None)
        process = await HarnessProcess.start(command, folder, {}, b"", max_file_bytes=5000)
        assert await process.wait() == 128 + signal.SIGXFSZ
        file = folder.output if len(command[-1]) < 20 else folder.workspace / "file"
        assert file.stat().st_size == 5000

    run(work)


def test_output_that_a_command_has_replaced_does_not_hold_the_worker() -> None:
    folder = HarnessFolder.make(None)
    os.mkfifo(folder.output)
    assert folder.tail() == ""


def test_a_command_that_kills_its_launcher_ends_with_all_that_it_has_started() -> None:
    async def work() -> None:
        folder = HarnessFolder.make(None)
        program = ESCAPES.format(then=KILLS_LAUNCHER)
        process = await HarnessProcess.start([sys.executable, "-c", program], folder, {}, b"", max_file_bytes=10**7)
        assert await process.wait() == 128 + signal.SIGKILL
        pid = escaped(folder)
        await process.end()
        wait_until(lambda: not runs(pid))

    run(work)


def test_a_launcher_that_does_not_answer_is_killed_with_all_that_its_command_has_started() -> None:
    async def work() -> None:
        folder = HarnessFolder.make(None)
        program = ESCAPES.format(then="os.kill(os.getppid(), 19)\ntime.sleep(600)")
        process = await HarnessProcess.start([sys.executable, "-c", program], folder, {}, b"", max_file_bytes=10**7)
        pid = await asyncio.to_thread(escaped, folder)
        await process.end()
        wait_until(lambda: not runs(pid))

    run(work)


def test_a_process_that_is_just_starting_a_program_ends_with_the_others() -> None:
    """Linux shows no environment of a process for a moment after it has replaced its program."""
    folder = HarnessFolder.make(None)
    for _ in range(30):
        with subprocess.Popen(["sleep", "600"], env=folder.environment({})) as process:
            folder.end_processes()
            process.terminate()  # ends it only if it was missed
            assert process.wait() == -signal.SIGKILL
    folder.remove()


HOLDS = """
import sys
from rollq.workers.gateway.harnesses.process import HarnessFolder
folder = HarnessFolder.make(None, *sys.argv[1:])
print(folder.root, flush=True)
sys.stdin.read()
"""


def test_a_folder_whose_worker_is_gone_is_removed_at_the_next_start_and_no_other() -> None:
    mine = HarnessFolder.make(None)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        folder = Path(worker.stdout.readline().strip())
        remove_left_folders()
        assert folder.exists()
        worker.kill()
    remove_left_folders()
    assert not folder.exists()
    assert mine.root.exists()
    mine.remove()
    assert not mine.root.exists()


def test_a_folder_is_cleaned_and_removed_however_deep_and_linked_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other, mine = HarnessFolder.make(None), HarnessFolder.make(None)
    monkeypatch.chdir(mine.workspace)
    for number in range(2_000):
        os.symlink(f"link{number + 1}", f"link{number}")
    os.symlink(other.workspace, "link2000")
    for _ in range(1_500):
        os.mkdir("d")
        os.chdir("d")
    os.symlink(other.workspace, "deep")
    for _ in range(1_500):  # beyond the longest path
        os.mkdir("d")
        os.chdir("d")
    Path("file").touch()
    os.chdir(mine.workspace)
    Path("locked/inner").mkdir(parents=True)
    Path("locked").chmod(0)
    mine.root.chmod(0o500)
    assert mine.remove_foreign_links() >= 2
    assert not os.path.lexists("link2000")
    monkeypatch.chdir(tmp_path)
    mine.remove()
    assert list(sessions_folder().iterdir()) == [other.root]
    other.remove()
    assert list(sessions_folder().iterdir()) == []


def test_a_folder_has_the_path_of_the_attempt_before_unless_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, "sums-1-0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        first = Path(worker.stdout.readline().strip())
        assert first == sessions_folder() / "sums-1-0"
        (first / "workspace" / "half done").touch()
        beside = HarnessFolder.make(None, "sums-1-0")
        assert beside.root != first
        worker.kill()
    again = HarnessFolder.make(None, "sums-1-0")
    assert again.root == first
    assert list(again.workspace.iterdir()) == []
    for folder in (beside, again):
        folder.remove()
    assert list(sessions_folder().iterdir()) == []


def test_a_folder_that_was_made_anew_while_a_left_one_was_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = HarnessFolder.make(None, "sums-1-0")
    assert left.lock is not None
    os.close(left.lock)
    made: list[HarnessFolder] = []
    lock = fcntl.flock

    def late(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not made:  # another worker is faster
            made.append(left)
            made[0] = HarnessFolder.make(None, "sums-1-0")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_left_folders()
    assert made[0].root == left.root
    assert made[0].workspace.exists()
    made[0].remove()


def test_what_outlives_its_worker_and_its_launcher_ends_at_the_next_start() -> None:
    program = ESCAPES.format(then=KILLS_LAUNCHER)
    with subprocess.Popen([sys.executable, "-c", WORKER, program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        folder = HarnessFolder(Path(worker.stdout.readline().strip()))
        pid = escaped(folder)
        worker.kill()
    remove_left_folders()
    wait_until(lambda: not runs(pid))
    assert not folder.root.exists()


def test_a_command_whose_worker_has_died_before_does_not_start_and_its_folder_goes(tmp_path: Path) -> None:
    folder = HarnessFolder.make(None)
    command = ["touch", str(tmp_path / "started")]
    nobody = str(2**22 + 1)  # beyond the largest process id
    done = subprocess.run(bare_python(launcher.__name__, nobody, folder.root, 1, "", *command))
    assert done.returncode == 1
    assert not folder.root.exists()
    assert not (tmp_path / "started").exists()


def test_a_command_has_the_prompt_a_workspace_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLQ_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    template = tmp_path / "template"
    template.mkdir()
    (template / "file").write_text("content")
    shown = "sys.stdin.read(), open('file').read(), os.getcwd() == os.environ['HOME'], dict(os.environ)"
    program = f"import os, sys; print({shown})"

    async def work() -> str:
        folder = HarnessFolder.make(template)
        process = await HarnessProcess.start(
            [sys.executable, "-c", program], folder, {"MODE": "train"}, b"the prompt", max_file_bytes=10**7
        )
        assert await process.wait() == 0
        return folder.tail()

    said = run(work)
    assert said.startswith("the prompt content True")
    assert "'MODE': 'train'" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["no such program"], 127, "no such program: No such file"),
        (["sh", "-c", "kill -9 $$"], 128 + signal.SIGKILL, ""),
    ],
)
def test_a_command_that_cannot_start_or_is_killed_has_a_code(command: list[str], code: int, words: str) -> None:
    async def work() -> tuple[int, str]:
        folder = HarnessFolder.make(None)
        process = await HarnessProcess.start(command, folder, {}, b"", max_file_bytes=10**7)
        return await process.wait(), folder.tail()

    found, tail = run(work)
    assert found == code
    assert words in tail

"""An agent whose shell is hostile: it gains no reward, and breaks no other sample."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.common.sealing import landlock
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.workers.gateway.harnesses.enclosure import Enclosure
from rollq.workers.gateway.harnesses.local import HarnessSettings, can_enclose
from rollq.workers.gateway.harnesses.process import HarnessFolder, HarnessProcess, sessions_folder
from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.settings import GatewaySettings
from support.chat_engine import Model, chat_tokenizer, rollout
from support.gateway_calls import run
from support.waiting import PATIENCE_S

HOSTILE = Path(__file__).parents[2] / "support" / "hostile_agent.sh"
VICTIM = """
echo good > file
while [ ! -e go ]; do sleep 0.1; done
cat file
cat "$SHARED"
curl -s -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/chat/completions" \
  --data '{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}' > /dev/null
"""


@pytest.fixture
def can_be_enclosed() -> None:
    if not can_enclose(HarnessSettings(command=("sh",))):
        pytest.skip("this system has no namespaces for commands")


@pytest.mark.usefixtures("can_be_enclosed")
def test_a_hostile_shell_gains_no_reward_and_breaks_no_other_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("password", "shared"):
        (tmp_path / name).write_text(f"the {name}")
    agent = tmp_path / "agent.sh"
    agent.write_text(VICTIM)
    monkeypatch.setenv("ROLLQ_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    victim_folder = sessions_folder() / f"hostile{os.getpid()}-1-1"
    variables = {
        "VICTIM": str(victim_folder),
        "AGENT": str(agent),
        "WORKER": str(os.getpid()),
        "SHARED": str(tmp_path / "shared"),
        "PASSWORD_FILE": str(tmp_path / "password"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ends: list[Callable[[], object]] = []

    async def work() -> None:
        gateway = Gateway(GatewaySettings())
        server = Server(gateway)
        await server.start()
        model = Model(chat_tokenizer(tmp_path / "model"), ["Trained", "Fine"])

        async def sample(name: str, script: Path) -> "asyncio.Task[Sample]":
            options = {"command": ["sh", str(script)], "env": variables, "tool_parser": "", "max_processes": 400}
            loop = make_loop("harness", options, gateway)
            given = replace(
                rollout(model, Prompt("Hi")), session=f"hostile{os.getpid()}/1/{name}/1", at_end=ends.append
            )
            return asyncio.ensure_future(loop.run(given))

        try:
            victim = await sample("1", agent)
            while not (victim_folder / "workspace" / "file").exists():
                assert not victim.done(), victim.result()
                await asyncio.sleep(0.05)
            hostile = await asyncio.wait_for(await sample("0", HOSTILE), PATIENCE_S)
            (victim_folder / "workspace" / "go").touch()
            other = await asyncio.wait_for(victim, PATIENCE_S)
        finally:
            await server.close()
        output = hostile.extra["harness"]["output"]
        assert output.splitlines() == [
            "call: 200",
            "reward: 401",
            "reward without a path: 401",
            "fail: 401",
            "session: 401",
            "other tokens: 0",
            "the worker: hidden",
            "other folders: 0",
            "other workspace: refused",
            "other program: exit 1",  # in a layer that nobody else sees
            "the system: refused",
            "temporary file: bad",
            "password: ",
            "settings: refused",
            "uncovered: no",
            "uncovered as root: no",
            "forks: refused",
            "still here",
        ]
        workspace = Path(hostile.extra["harness"]["workspace"])
        assert (hostile.extra["harness"]["removed_links"], [path.name for path in workspace.glob("st*")]) == (
            4,
            [],
        )
        assert (workspace / "its own").is_symlink()
        assert (hostile.reward, hostile.extra["refused_outcomes"], hostile.text) == (None, 3, "Trained")
        assert gateway.refused_outcomes == 3
        assert (other.reward, other.text, other.extra["harness"]["exit_code"]) == (None, "Fine", 0)
        assert other.extra["harness"]["output"] == "good\nthe shared"
        assert "refused_outcomes" not in other.extra
        assert agent.read_text() == VICTIM

    try:
        run(work)
    finally:
        for end in ends:
            end()


@pytest.mark.usefixtures("can_be_enclosed")
def test_a_command_writes_where_the_task_lets_it(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("shared", "closed")]
    for place in places:
        place.mkdir()
    script = f"for place in {places[0]} {places[1]}; do touch $place/file; echo $?; done; touch /dev/shm/x; echo $?"

    async def work() -> str:
        options = {"command": ["sh", "-c", script], "writable": [str(places[0])], "tool_parser": ""}
        loop = make_loop("harness", options)
        sample = await loop.run(rollout(Model(chat_tokenizer(tmp_path / "model"), []), Prompt("Hi")))
        return str(sample.extra["harness"]["output"])

    assert run(work).split() == ["0", "0", "0"]  # /tmp, where this test is, may be written to, by this command alone
    assert [list(place.iterdir()) for place in places] == [[places[0] / "file"], []]


@pytest.mark.usefixtures("can_be_enclosed")
@pytest.mark.parametrize("place", ["", "/app"])
def test_a_command_sees_of_the_workspaces_of_rows_only_its_copy(place: str, tmp_path: Path) -> None:
    for name in ("task/files", "task/tests"):
        (tmp_path / "rows" / name).mkdir(parents=True)
        (tmp_path / "rows" / name / "file").write_text(name)
    script = f"""
    cat {place or "."}/file; echo; pwd
    find {tmp_path}/rows
    umount {tmp_path}/rows 2> /dev/null || unshare -Urm umount {tmp_path}/rows 2> /dev/null || echo covered
    touch /usr/file /file 2> /dev/null || echo refused
    echo changed > {place or "."}/file
    """
    options = {"command": ["sh", "-c", script], "workspace": tmp_path / "rows", "workspace_field": "folder"}
    ends: list[Callable[[], object]] = []

    async def work() -> Sample:
        loop = make_loop("harness", {**options, "workspace_at": place, "tool_parser": ""})
        prompt = Prompt("Hi", metadata={"folder": "task/files"})
        model = Model(chat_tokenizer(tmp_path / "model"), [])
        return await loop.run(replace(rollout(model, prompt), at_end=ends.append))

    facts = run(work).extra["harness"]
    seen, here, *shown = facts["output"].splitlines()
    assert (seen, here) == ("task/files", facts["workspace"])
    assert shown == [f"{tmp_path}/rows", "covered", "refused"]
    assert (Path(facts["workspace"]) / "file").read_text() == "changed\n"
    assert (tmp_path / "rows" / "task" / "files" / "file").read_text() == "task/files"
    for end in ends:
        end()


PROBES = """
import os, pathlib, pty, socket, subprocess, sys
outer = sys.argv[1]
try:
    socket.socket(socket.AF_UNIX).connect(chr(0) + outer)
    print("socket: connected")
except OSError:
    print("socket: refused")
mount = ["unshare", "--user", "--map-root-user", "--mount", "--cgroup", "mount", "-t"]
for kind in ("cgroup2", "tmpfs"):
    print(kind, subprocess.run([*mount, kind, "none", os.environ["TMPDIR"]], stderr=subprocess.DEVNULL).returncode != 0)
print("sockets of the system:", *os.listdir("/run"))
print("devices:", *sorted(os.listdir("/dev")))
print("terminals:", *sorted(os.listdir("/dev/pts")))
master, slave = pty.openpty()
os.write(slave, b"typed")
print("own terminal:", os.ttyname(slave), os.read(master, 5).decode())
for path in ("a", "b"):
    os.mkdir(path)
pathlib.Path("a/file").write_text("moved")
os.rename("a/file", "b/file")
os.link("b/file", "a/file")
open("/dev/null", "w").write("x")
open("/dev/shm/x", "w").write("x")
print(pathlib.Path("a/file").read_text(), len(open("/dev/urandom", "rb").read(8)))
"""


@pytest.mark.usefixtures("can_be_enclosed")
def test_a_command_has_separate_devices_and_sockets_and_mounts_nothing(tmp_path: Path) -> None:
    name = f"rollq-{os.getpid()}"
    (tmp_path / "probes.py").write_text(PROBES)
    folder = HarnessFolder.make(None)

    async def work() -> str:
        command = [sys.executable, str(tmp_path / "probes.py"), name]
        enclosure = Enclosure(str(folder.root), writable=(str(tmp_path),))
        process = await HarnessProcess.start(command, folder, {}, b"", max_file_bytes=1 << 20, enclosure=enclosure)
        await process.wait()
        await process.end()
        return folder.tail()

    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{name}")
            listening.listen()
            assert asyncio.run(work()).splitlines() == [
                "socket: refused" if landlock.version() >= 6 else "socket: connected",
                "cgroup2 True",
                "tmpfs True",
                "sockets of the system:",
                "devices: fd full null ptmx pts random shm stderr stdin stdout tty urandom zero",
                "terminals: ptmx",
                "own terminal: /dev/pts/0 typed",
                "moved 8",
            ]
    finally:
        folder.remove()

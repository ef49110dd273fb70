"""Tasks in Harbor's layout that have an image, in real containers of podman."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.environments.kinds import Level
from rollq.workers.gateway.harnesses.process import sessions_folder
from support.container_images import configure_podman, import_image
from support.harbor_tasks import TEST, add_task, judged, source
from support.waiting import wait_until

BASE = "rollq-tests"
PAID = {"score": 1, "tests_timed_out": 0}
DOCKERFILE = f"FROM {BASE}\nCOPY draft /app/draft\nRUN echo built > /app/built\nWORKDIR /app\n"


def podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout


def containers() -> list[str]:
    return podman("ps", "--all", f"--filter=label=rollq.sessions={sessions_folder()}", "--format={{.Names}}").split()


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if shutil.which("podman") is None:
        pytest.fail("install podman, such as by: apt install podman runc")
    folder = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in configure_podman(folder).items():
            patch.setenv(name, value)
        import_image(BASE, folder)
        yield
        assert not containers()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def add_contained(folder: Path, name: str = "hello", **texts: str) -> Path:
    task = add_task(folder, name, **texts)
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    return task


HONEST = "cat draft built; echo the secret greeting > /app/greeting"


def test_a_command_that_does_the_task_is_paid(folder: Path, tmp_path: Path) -> None:
    add_contained(folder)
    script = '[ "$(cat)" ] && [ "$OPENAI_API_KEY" ] && cat "$ROLLQ_SESSION_METADATA" && ' + HONEST
    assert judged(source(folder), script, tmp_path) == PAID


def test_images_of_a_registry_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    add_task(folder, settings=f'[environment]\ndocker_image = "{BASE}"')
    assert judged(source(folder), "echo the secret greeting > /app/greeting", tmp_path) == PAID


def test_files_outside_the_working_folder_stay_for_the_tests(folder: Path, tmp_path: Path) -> None:
    add_contained(folder, test="cat /etc/motd > /logs/verifier/reward.txt")
    assert judged(source(folder), "echo 0.5 > /etc/motd", tmp_path) == {"score": 0.5, "tests_timed_out": 0}


def test_users_of_images_need_not_be_root(folder: Path, tmp_path: Path) -> None:
    dockerfile = add_contained(folder) / "environment" / "Dockerfile"
    dockerfile.write_text(f"{DOCKERFILE}RUN chmod 777 /app\nUSER 1000:1000\n")
    assert judged(source(folder), HONEST, tmp_path) == PAID
    cheat = "mkdir /logs /tests; echo 1 > /usr/bin/bash; true"
    assert judged(source(folder), cheat, tmp_path) == {"score": 0, "tests_timed_out": 0}


def test_commands_see_mounted_folders_and_reach_this_machine(folder: Path, tmp_path: Path) -> None:
    add_contained(folder)
    (tmp_path / "agent").write_text(HONEST)
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent, port = tmp_path / "agent", server.getsockname()[1]
        script = f"exec 3<>/dev/tcp/127.0.0.1/{port} && bash {agent} && ! rm {agent}"
        assert judged(source(folder), script, tmp_path, mounted=[str(tmp_path)]) == PAID
        server.settimeout(0)
        server.accept()[0].close()


def test_processes_are_limited(folder: Path, tmp_path: Path) -> None:
    add_contained(folder)
    script = f"for i in $(seq 500); do sleep 1000 & done; {HONEST}"
    assert judged(source(folder), script, tmp_path, max_processes=1000) == PAID
    assert judged(source(folder), script, tmp_path, max_processes=301) == {"score": 0, "tests_timed_out": 0}


def test_tests_may_leave_processes(folder: Path, tmp_path: Path) -> None:
    add_contained(folder, test="setsid sleep 1000 & echo 1 > /logs/verifier/reward.txt")
    assert judged(source(folder), HONEST, tmp_path) == PAID


CHEATS = {
    "does nothing": "true",
    "looks for tests": "cat /tests/* /solution/* {folder}/hello/tests/expected > greeting",
    "writes rewards and tests": "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "echo '{{\"reward\": 1}}' > /logs/verifier/reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "links to other folders": "mkdir /mine; ln -s /mine /tests; ln -s /mine /logs; echo 1 > /mine/reward.txt; "
    "mkdir /mine/verifier; echo 1 > /mine/verifier/reward.txt",
    "leaves processes": "(trap '' TERM HUP; while sleep 0.05; do mkdir -p /logs/verifier; "
    "echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 & "
    "setsid nohup bash -c 'while sleep 0.05; do echo the secret greeting > /app/greeting; cat /tests/*; done' &",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_command_that_cheats_gets_nothing(cheat: str, folder: Path, tmp_path: Path) -> None:
    add_contained(folder, test=f"{TEST}\nsleep 1")  # time for what is left to write another reward
    script = CHEATS[cheat].format(folder=folder)
    if cheat == "leaves processes":
        script = script.replace("the secret greeting", "$(cat /tests/expected)")
    assert judged(source(folder), script + "\ntrue", tmp_path) == {"score": 0, "tests_timed_out": 0}


@pytest.mark.parametrize(
    ("test", "kind", "words"),
    [
        ("echo broken; exit 3", FailureKind.GRADER, "neither reward.txt nor reward.json (exit code 3): broken"),
        ("no-such-program", FailureKind.SANDBOX, "the tests cannot start: "),
        ("echo nan > /logs/verifier/reward.txt", FailureKind.GRADER, "not a finite number"),
        ("mkdir /logs/verifier/reward.txt", FailureKind.GRADER, "reward.txt is not a file"),
    ],
)
def test_tests_that_give_no_reward_fail_the_sample(
    test: str, kind: FailureKind, words: str, folder: Path, tmp_path: Path
) -> None:
    add_contained(folder, test=test)
    failed = judged(source(folder), HONEST, tmp_path)
    assert isinstance(failed, SampleFailed), failed
    assert failed.kind is kind
    assert words in str(failed)


def test_tests_that_hang_give_nothing(folder: Path, tmp_path: Path) -> None:
    add_contained(folder, test="echo 1 > /logs/verifier/reward.txt; sleep 1000", settings="[verifier]\ntimeout_sec = 1")
    assert judged(source(folder), HONEST, tmp_path) == {"score": 0, "tests_timed_out": 1}


def test_a_failed_build_is_refused(folder: Path, tmp_path: Path) -> None:
    (add_contained(folder) / "environment" / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo oh && no-such-program\n")
    with pytest.raises(ConfigError, match=r"(?s)hello: its image cannot be built: podman build: .*no-such-program"):
        judged(source(folder), HONEST, tmp_path)


def test_a_killed_workers_container_is_removed_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    add_contained(folder)
    code = "import sys; from pathlib import Path; from support.harbor_tasks import judged, source; "
    code += "judged(source(Path(sys.argv[1])), 'echo started > /started; sleep 10000', Path(sys.argv[2]))"
    worker = subprocess.Popen([sys.executable, "-c", code, folder, tmp_path])
    try:
        wait_until(lambda: has_started(containers()))
    finally:
        worker.kill()
        worker.wait()
    (left,) = containers()
    assert judged(source(folder), HONEST, tmp_path) == PAID
    assert left not in containers()


def has_started(names: list[str]) -> bool:
    return (
        bool(names)
        and not subprocess.run(["podman", "exec", names[0], "cat", "/started"], capture_output=True).returncode
    )


def test_a_check_tries_the_solution_and_an_untouched_image(folder: Path) -> None:
    add_contained(folder, "good")
    add_contained(folder, "paid", test="echo 1 > /logs/verifier/reward.txt")
    add_contained(folder, "broken", solution="echo oh; exit 3")
    made = source(folder)
    findings = [(finding.level, finding.text) for finding in made.check(list(made.rows()))]
    assert findings == [
        (Level.ERROR, "broken: its solution ends with exit code 3: oh"),
        (Level.ERROR, "paid: an untouched workspace scores 1"),
    ]

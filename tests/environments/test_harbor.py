"""The kind `harbor`: tasks in Harbor's layout, with real commands and real tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.environments.harbor import judge as harbor_judge
from rollq.environments.harbor.copying import copy_workspace
from rollq.environments.harbor.images import image_of
from rollq.environments.harbor.rewards import read_rewards
from rollq.environments.kinds import Level
from rollq.producer.columns import Columns
from rollq.workers.gateway.harnesses.local import HarnessSettings, can_enclose
from rollq.workers.groups.agent_loops import make_loop
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.process_pool import JudgePool
from support.harbor_tasks import add_task, judged, source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


@pytest.fixture
def can_be_enclosed() -> None:
    if not can_enclose(HarnessSettings(command=("sh",))):
        pytest.skip("this system has no namespaces for commands")


def test_rows_have_the_instruction_and_the_files_of_each_task(folder: Path) -> None:
    add_task(folder, "b")
    add_task(folder, "a")
    rows = list(source(folder).rows())
    assert rows == [
        {
            "prompt": f"Write a greeting to /app/greeting: {name}",
            "env": {"task": name},
            "workspace": f"{name}/environment",
        }
        for name in ("a", "b")
    ]


def test_folders_of_splits_have_separate_tasks(folder: Path) -> None:
    for split in ("train", "test"):
        add_task(folder, f"{split}/{split}ed")
    assert [row["env"]["task"] for split in ("train", "test") for row in source(folder, split).rows()] == [
        "train/trained",
        "test/tested",
    ]


def test_a_folder_of_tasks_may_have_one_of_another_split_beside_them(folder: Path) -> None:
    add_task(folder, "a")
    add_task(folder, "test/b")
    assert [row["env"]["task"] for row in source(folder).rows()] == ["a"]


def test_identity_depends_on_all_files(folder: Path) -> None:
    seen = {source(folder).identity()["files"] for _ in range(2) if add_task(folder)}
    assert len(seen) == 1
    (folder / "hello" / "tests" / "expected").write_text("another greeting")
    seen.add(source(folder).identity()["files"])
    (folder / "hello" / "tests" / "test.sh").chmod(0o755)
    seen.add(source(folder).identity()["files"])
    (folder / "hello" / "environment" / "empty").mkdir()
    seen.add(source(folder).identity()["files"])
    assert len(seen) == 4


def test_identity_depends_on_files_behind_links(folder: Path) -> None:
    tests = add_task(folder) / "tests"
    (folder / ".shared").mkdir()
    for shared in (folder / ".shared/helper", folder.parent / "outside"):
        shared.write_text("one")
    (tests / "helpers").symlink_to(folder / ".shared")
    (tests / "circle").symlink_to(tests)
    (tests / "outside").symlink_to(folder.parent / "outside")
    seen = {source(folder).identity()["files"]}
    for shared in (folder / ".shared/helper", folder.parent / "outside"):
        shared.write_text("other")
        seen.add(source(folder).identity()["files"])
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda task: (task / "tests" / "test.sh").unlink(), "hello is not complete: tests/test.sh is missing"),
        (lambda task: (task / "task.toml").unlink(), "hello is not complete: task.toml is missing"),
        (lambda task: (task / "task.toml").write_text("="), "task.toml cannot be read: "),
        (
            lambda task: (task / "task.toml").write_text("[verifier]\ntimeout_sec = 0"),
            "verifier.timeout_sec = 0",
        ),
        (lambda task: (task / "task.toml").write_text("steps = [{}]"), "tasks with several steps are not supported"),
        (
            lambda task: (task / "task.toml").write_text('[verifier.env]\nKEY = "${KEY}"'),
            "verifier.env.KEY = '${KEY}': tests get no environment variables of this machine",
        ),
        (
            lambda task: (task / "environment" / "docker-compose.yaml").write_text("services: {}"),
            "hello has several containers (environment/docker-compose.yaml), and rollq starts one: run the worker",
        ),
        (lambda task: task.with_name("link").symlink_to(task), "link is a link: copy the task there"),
        (lambda task: task.with_name("notes").mkdir(), "notes is not complete: instruction.md is missing"),
    ],
)
def test_an_incomplete_task_is_refused(change: Callable[[Path], object], words: str, folder: Path) -> None:
    change(add_task(folder))
    with pytest.raises(ConfigError) as refused:
        source(folder)
    assert words in str(refused.value)


def give_image(task: Path, how: str) -> None:
    if how == "Dockerfile":
        (task / "environment" / how).write_text("FROM debian")
    else:
        (task / "task.toml").write_text('[environment]\ndocker_image = "debian"')


@pytest.mark.parametrize("how", ["Dockerfile", "docker_image"])
@pytest.mark.parametrize("found", ["nothing", "a program that does not answer"])
def test_images_need_a_program_that_starts_containers(
    how: str, found: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_image(add_task(folder), how)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "podman is not on the PATH"
    if found != "nothing":
        (tmp_path / "podman").write_text("#!/bin/sh\necho no socket; exit 1")
        (tmp_path / "podman").chmod(0o755)
        reason = "podman does not answer: podman info: no socket"
    settings = source(folder).settings()
    options = harbor_judge.TestsOptions(**settings["judge_options"])
    with pytest.raises(ConfigError) as refused:
        harbor_judge.JUDGE(options, JudgeContext(60, JudgePool(1)))
    words = f"which needs podman or docker ({reason}; docker is not on the PATH): install one of them, or run"
    assert "hello has an image (" in str(refused.value)
    assert words in str(refused.value)
    assert str(refused.value).endswith("and set env_options.without_images = true")
    with pytest.raises(ConfigError, match=r"agent_options.images needs podman or docker: podman"):
        make_loop(settings["agent_loop"], {"command": ["agent"], **settings["agent_options"]})


@pytest.mark.parametrize("how", ["Dockerfile", "docker_image"])
def test_images_can_be_left_out(how: str, folder: Path) -> None:
    give_image(add_task(folder), how)
    settings = source(folder, without_images=True).settings()
    assert settings["agent_options"] == {
        "workspace": str(folder),
        "workspace_field": "workspace",
        "workspace_at": "/app",
    }
    assert settings["judge_options"]["containers"] is False


def test_equal_files_share_an_image(folder: Path) -> None:
    images: list[str] = []
    for name, text in (("a", "FROM debian"), ("b", "FROM debian"), ("c", "FROM alpine")):
        task = add_task(folder, name, test=f"exit {len(images)}")
        (task / "environment" / "Dockerfile").write_text(text)
        images.append(image_of(task / "environment"))
    assert images[0].startswith("rollq-harbor:")
    assert images[0] == images[1] != images[2]


@pytest.mark.parametrize(
    ("options", "split", "words"),
    [
        ({"workdir": "/usr"}, "train", "env_options.workdir = '/usr': must be a path directly below /"),
        ({"image": ""}, "train", "env_options.image: unknown key"),
        ({}, "test", 'env_split = "test": there is no folder '),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], split: str, words: str, folder: Path) -> None:
    add_task(folder)
    with pytest.raises(ConfigError) as refused:
        source(folder, split, **options)
    assert words in str(refused.value)


def test_settings_have_the_longest_time_of_a_task(folder: Path) -> None:
    add_task(folder, "a", settings="[agent]\ntimeout_sec = 30")
    add_task(folder, "b", settings="[agent]\ntimeout_sec = 90")
    settings = source(folder, command=["agent", "-x"]).settings()
    assert settings["agent_options"]["timeout_s"] == 90
    assert settings["agent_options"]["command"] == ["agent", "-x"]


def test_a_producer_takes_the_rows(folder: Path) -> None:
    add_task(folder)
    made = source(folder)
    (row,) = made.rows()
    prompt, _ = Columns(answer_field=made.settings()["answer_field"]).prompt(row)
    assert (prompt.content, prompt.answer) == (row["prompt"], None)
    assert dict(prompt.metadata) == {"env": row["env"], "workspace": "hello/environment"}


HONEST = "cat /app/draft draft; echo the secret greeting > /app/greeting"
DEEP_LINK = """
import os
os.chdir(os.environ["HOME"])
way = []
while sum(map(len, way)) + len(way) < 3_980:
    way.append("d" * 99)
    os.mkdir(way[-1])
    os.chdir(way[-1])
os.symlink("/tests/expected", "l")
os.chdir(os.environ["HOME"])
os.symlink("/".join(way) + "/l", "greeting")
"""
CHEATS = {
    "writes rewards and tests": "mkdir -p tests /tests ../tests logs/verifier verifier /logs/verifier; "
    "for f in reward.txt logs/verifier/reward.txt ../reward.txt ../logs-x /logs/verifier/reward.txt; do echo 1 > $f; "
    "done; for f in tests/test.sh /tests/test.sh ../tests/test.sh .bashrc .profile .bash_profile; do "
    "echo 'echo 1 > /logs/verifier/reward.txt; exit' > $f; done",
    "copies tests and solution": "cat {folder}/hello/tests/expected {folder}/*/solution/solve.sh > greeting",
    "reads the repository of the tasks": "cat {folder}/../.git/config > greeting",
    "links to tests": "ln -s {folder}/hello/tests/expected greeting",
    "links to tests in place": "ln -s / up; ln -s /app/up/tests/expected greeting",
    "leaves processes": "(trap '' TERM HUP; while sleep 0.05; do for d in /logs/verifier ../logs-*/verifier; do "
    "echo 1 > $d/reward.txt; done; done) > /dev/null 2>&1 & setsid nohup sleep 1000 > /dev/null 2>&1 &",
    "links what is written": "rm -rf ../tmp ../output.log ../prompt; ln -s {victim} ../output.log; "
    "ln -s {victim} ../prompt; ln -s /usr ../tmp; chmod 0 . ..",
    "replaces its workspace": "cd /; rm -rf $HOME; ln -s /tests $HOME",
    "removes its workspace": "cd /; rm -rf $HOME",
    "links from a folder that cannot be listed": "mkdir out; ln -s /tests/expected out/greeting; "
    "ln -s out/greeting greeting; chmod 0111 out; chmod 0 ..",
    "links deeper than a path can be": f"python3 -c '{DEEP_LINK}'",
}


@pytest.mark.usefixtures("can_be_enclosed")
def test_a_command_that_does_the_task_is_paid(folder: Path, tmp_path: Path) -> None:
    add_task(folder)
    assert judged(source(folder), HONEST, tmp_path) == {"score": 1.0, "tests_timed_out": 0.0}


@pytest.mark.usefixtures("can_be_enclosed")
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_command_that_cheats_gets_nothing(cheat: str, folder: Path, tmp_path: Path) -> None:
    add_task(folder)
    (folder.parent / ".git").mkdir()
    (folder.parent / ".git" / "config").write_text("the secret greeting")
    victim = tmp_path / "victim"
    victim.write_text("whole")
    script = CHEATS[cheat].format(folder=folder, victim=victim) + "\ntrue"
    assert judged(source(folder), script, tmp_path) == {"score": 0.0, "tests_timed_out": 0.0}
    assert victim.read_text() == "whole"


@pytest.mark.usefixtures("can_be_enclosed")
@pytest.mark.parametrize(
    ("test", "kind", "words"),
    [
        ("echo broken; exit 3", FailureKind.GRADER, "neither reward.txt nor reward.json (exit code 3): broken"),
        ("no-such-program", FailureKind.SANDBOX, "the tests cannot start: "),
        ("echo nan > /logs/verifier/reward.txt", FailureKind.GRADER, "not a finite number"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", FailureKind.GRADER, "reward.txt cannot be read"),
    ],
)
def test_tests_that_give_no_reward_fail_the_sample(
    test: str, kind: FailureKind, words: str, folder: Path, tmp_path: Path
) -> None:
    add_task(folder, test=test, settings="[verifier]\ntimeout_sec = 120")
    failed = judged(source(folder), HONEST, tmp_path)
    assert isinstance(failed, SampleFailed), failed
    assert failed.kind is kind
    assert words in str(failed)


@pytest.mark.usefixtures("can_be_enclosed")
def test_work_that_the_tests_do_not_get_done_with_is_worth_nothing(folder: Path, tmp_path: Path) -> None:
    """If it failed, samples that hang would vanish from their groups."""
    add_task(folder, test="/app/program", settings="[verifier]\ntimeout_sec = 2")
    hangs = "echo 'kill -INT 1; sleep 1000' > program; chmod +x program"
    assert judged(source(folder), hangs, tmp_path) == {"score": 0.0, "tests_timed_out": 1.0}


@pytest.mark.parametrize(
    ("name", "text", "rewards"),
    [
        ("reward.txt", "0.5\n", {"score": 0.5}),
        ("reward.json", '{"reward": 1, "style": 0.25}', {"score": 1.0, "style": 0.25}),
        ("reward.json", '{"tests": 0.5, "style": 0.25}', {"tests": 0.5, "style": 0.25}),
        ("reward.txt", "", None),
        ("reward.txt", "1e999", None),
        ("reward.txt", " " * 70_000, None),
        ("reward.json", "[1]", None),
        ("reward.json", "{}", None),
        ("reward.json", '{"reward": true}', None),
        ("reward.json", '{"reward": "1"}', None),
        ("other", "1", None),
    ],
)
def test_rewards_are_finite_numbers(name: str, text: str, rewards: dict[str, float] | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    if rewards is not None:
        assert read_rewards(tmp_path) == rewards
        return
    with pytest.raises(ValueError, match="reward"):
        read_rewards(tmp_path)


def test_a_fifo_is_no_reward(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reward.txt")
    with pytest.raises(ValueError, match="not a file"):
        read_rewards(tmp_path)


def test_systems_without_namespaces_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_task(folder)
    monkeypatch.setattr(harbor_judge, "problem", lambda _: "unshare: not permitted")
    options = harbor_judge.TestsOptions(**source(folder).settings()["judge_options"])
    with pytest.raises(ConfigError, match=r"needs Linux namespaces.*unshare: not permitted"):
        harbor_judge.JUDGE(options, JudgeContext(60, JudgePool(1)))


@pytest.mark.usefixtures("can_be_enclosed")
def test_a_check_tries_the_solution_and_an_untouched_workspace(folder: Path) -> None:
    add_task(folder, "good")
    add_task(folder, "paid", test="echo 1 > /logs/verifier/reward.txt")
    add_task(folder, "wrong", solution="echo Hullo > greeting")
    add_task(folder, "broken", solution="echo oh; exit 3")
    add_task(folder, "silent", test="[ -e greeting ] && echo 1 > /logs/verifier/reward.txt")
    (add_task(folder, "unsolved") / "solution" / "solve.sh").unlink()
    made = source(folder)
    findings = [(finding.level, finding.text) for finding in made.check(list(made.rows()))]
    assert [text.partition(":")[0] for _, text in findings] == ["broken", "paid", "silent", "unsolved", "wrong"]
    assert findings[0] == (Level.ERROR, "broken: its solution ends with exit code 3: oh")
    assert findings[1] == (Level.ERROR, "paid: an untouched workspace scores 1")
    assert findings[2][1].startswith("silent: an untouched workspace gets no reward, so such samples fail: the tests")
    assert findings[3][1].startswith("unsolved: there is no solution/solve.sh")
    assert findings[4] == (Level.ERROR, "wrong: its solution scores 0, not 1")


def test_links_to_programs_and_within_the_workspace_are_copied(tmp_path: Path) -> None:
    left, copy = tmp_path / "left", tmp_path / "copy"
    for path in (left / "sub" / "inner", copy):
        path.mkdir(parents=True)
    (left / "draft").write_text("Hullo")
    stay = {
        "python": "/usr/bin/env",
        "own": "draft",
        "placed": "/app/draft",
        "here": f"{left}/draft",
        "itself": "itself",
        "sub/up": "../draft",
        "usr": "/usr/bin",
        "over": "sub/up",
    }
    go = {
        "system": "/etc/hostname",
        "above": "../prompt",
        "lexical": "usr/../../etc/hostname",
        "sub/inner/lexical": "../../usr/../../etc/hostname",
        "sibling": f"{tmp_path}/left-too/draft",
        "place up": "/app/../copy/draft",
        "round": f"../{copy.name}/draft",
    }
    for name, text in {**stay, **go}.items():
        (left / name).symlink_to(text)
    os.mkfifo(left / "fifo")
    copy_workspace(left, copy, "/app")
    links = {str(path.relative_to(copy)): os.readlink(path) for path in copy.rglob("*") if path.is_symlink()}
    assert links == {**stay, "here": "/app/draft"}
    assert {path.name for path in copy.rglob("*") if not path.is_symlink()} == {"draft", "sub", "inner"}


def test_a_copy_keeps_modes_and_times(tmp_path: Path) -> None:
    left, copy = tmp_path / "left", tmp_path / "copy"
    for path in (left / "sub", copy):
        path.mkdir(parents=True)
    (left / "sub" / "run").write_text("true")
    (left / "sub" / "run").chmod(0o755)
    os.utime(left / "sub" / "run", (1_000, 2_000))
    copy_workspace(left, copy, "/app")
    status = (copy / "sub" / "run").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o755, 2_000)


def test_a_workspace_that_is_too_large_fails_the_sample(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_task(folder)
    monkeypatch.setattr("rollq.environments.harbor.copying.MOST_BYTES", 3 << 20)
    failed = judged(source(folder), "truncate -s 4M large", tmp_path)
    assert isinstance(failed, SampleFailed), failed
    assert failed.kind is FailureKind.PROGRAM
    assert "more than 3 MiB" in str(failed)

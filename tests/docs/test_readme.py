import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import redis

from rollq.buffer.rollouts import Prompt
from rollq.buffer.store.server import free_port
from rollq.cli.settings_file import load_settings
from rollq.monitor.records import METRICS_FILE, read_steps
from support.demo_folder import PREPARE
from support.documented_commands import ROOT, Desk, blocks, kill

BLOCKS = blocks(ROOT / "README.md")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def files() -> dict[str, str]:
    return {block.detail: block.code for block in BLOCKS if block.mark == "file"}


def code_with(words: str) -> str:
    """The only block that runs as it stands and holds `words`."""
    (code,) = [block.code for block in BLOCKS if block.mark == "" and words in block.code]
    return code


@pytest.fixture
def desk(tmp_path: Path) -> "Desk":
    return Desk(tmp_path, free_port("127.0.0.1"))


@pytest.fixture
def sums(desk: Desk, prepared_demo: Path) -> Path:
    """The folder that the README's command has made."""
    assert code_with("--prepare").split() == [*PREPARE]
    return shutil.copytree(prepared_demo, desk.folder / "sums")


def steps(metrics: Path) -> int:
    return len(read_steps(metrics)) if metrics.exists() else 0


def test_every_block_says_what_is_to_be_done_with_it() -> None:
    marks = {"", "terminals", "terminal", "file", "redis-cli", "elsewhere"}
    assert len(BLOCKS) == (ROOT / "README.md").read_text("utf-8").count("\n```") / 2
    assert {block.mark for block in BLOCKS} == marks
    assert {block.language for block in BLOCKS} == {"bash", "python", "toml"}


def test_the_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named = {target for page in PAGES for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text("utf-8"), re.M)}
    assert {"demo", "test"} <= named
    assert named - {"help"} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_roles_run_one_by_one_and_go_on_after_a_kill(desk: Desk, sums: Path, redis_cli: Path) -> None:
    (lines,) = [block.code.splitlines() for block in BLOCKS if block.mark == "terminals"]
    serve, produce, work, second_work, train = lines
    (desk.folder / "trainer.py").write_text(desk.local(files()["trainer.py"]))
    config = sums / "rollq.toml"
    config.write_text(desk.local(config.read_text("utf-8")))
    metrics = sums / "trainer" / METRICS_FILE
    with desk:
        desk.open("redis", serve)
        desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
        desk.open("produce", produce)
        desk.open("work", work)
        assert re.findall(r"^step (\d): reward \d", desk.run(code_with("trainer.py")), re.M) == ["1", "2", "3"]

        desk.open("second work", second_work)
        desk.open("train", train)
        desk.wait_until(lambda: steps(metrics) >= 4)
        kill(desk.terminals["train"])
        kill(desk.terminals["work"])
        trained = steps(metrics)
        del desk.terminals["work"]
        desk.open("train", train)
        desk.wait_until(lambda: steps(metrics) > trained)

        assert '"tasks"' in desk.run(code_with("status"))
        assert desk.run(code_with("rq-info")).startswith("queue rollq-demo: ")
        (look,) = [block.code for block in BLOCKS if block.mark == "redis-cli"]
        shown = [desk.run(line).strip() for line in look.splitlines()]
        assert shown[0].isdecimal()
        assert all(number.isdecimal() for number in shown[1:5])
        assert "consumed" in shown[5]
        assert '"version":' in shown[6]
        for name in ("train", "second work", "produce", "redis"):
            desk.interrupt(name)
        assert all("stopped" in desk.log(name).read_text() for name in ("train", "second work", "produce"))


def test_the_roles_run_on_several_machines_that_share_a_password(desk: Desk, sums: Path) -> None:
    terminals = [(block.detail, block.code) for block in BLOCKS if block.mark == "terminal"]
    for machine in {machine for machine, _ in terminals}:
        shutil.copytree(sums, desk.folder / machine / "sums")
    shutil.rmtree(sums)
    without_torch = desk.folder / "without-torch"
    without_torch.mkdir()
    (without_torch / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    metrics = desk.folder / "machine-1" / "sums" / "trainer" / METRICS_FILE
    with desk:
        for number, (machine, code) in enumerate(terminals):
            if "rollq produce" in code:
                code = f"export PYTHONPATH={without_torch}\n{code}"
            desk.open(f"terminal {number}", code, machine)
            desk.wait_until(lambda: b"serving at" in desk.log("terminal 0").read_bytes())
        desk.wait_until(lambda: steps(metrics) >= 2)
        with redis.Redis(port=desk.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_small_settings_are_complete_and_their_judge_judges(tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = load_settings(tmp_path / "small" / "rollq.toml", {})
    assert settings.tasks["gsm8k"].judge == "judges.short_and_right"
    spec = importlib.util.spec_from_file_location("judges", tmp_path / "small" / "judges.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Sample:
        text = " 42 "

    assert module.short_and_right(Prompt("?", answer="42"), Sample()) == {"right": 1.0, "length": -0.004}

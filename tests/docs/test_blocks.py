"""Code on pages that no test of a page runs: it compiles, its names and options exist, and where it can run it does."""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Status
from rollq.cli.main import Commands
from rollq.consumer import Consumer, ConsumerSettings
from rollq.producer.strategy import TaskState
from support.buffer_run import World, make_sample
from support.documented_commands import ROOT, Desk, blocks
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import wait_until

GUIDE = ROOT / "docs" / "guide"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
SHELL = {"bash", "sh"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
PYTHON = [(page, block.code) for page in PAGES for block in blocks(page) if block.language == "python"]
LINES = [
    (page, line)
    for page in PAGES
    for block in blocks(page)
    if block.language in SHELL
    for line in block.code.replace("\\\n", " ").splitlines()
]


def named(page: Path, text: str) -> str:
    return f"{page.stem}: {text.strip().splitlines()[0][:60]}" if text.strip() else page.stem


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[named(*shown) for shown in PYTHON])
def test_python_compiles_and_what_it_imports_from_rollq_exists(page: Path, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rollq":
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def commands(line: str, name: str) -> Iterator[list[str]]:
    """The arguments of each call of `name` in a line of shell."""
    words = shlex.split(line, comments=True)
    for at, word in enumerate(words):
        if word == name and (
            at == 0 or words[at - 1] in ("&&", "||", "|", ";", "sudo", "exec") or "=" in words[at - 1]
        ):
            rest = words[at + 1 :]
            ends = [place for place, other in enumerate(rest) if other in ("&&", "||", "|", ";", ">", "&", "2>&1")]
            yield rest[: min(ends, default=len(rest))]


ROLLQ = [(page, line) for page, line in LINES if re.search(r"\brollq [a-z]", line) and any(commands(line, "rollq"))]


@pytest.mark.parametrize(("page", "line"), ROLLQ, ids=[named(*shown) for shown in ROLLQ])
def test_commands_of_rollq_have_these_options(page: Path, line: str) -> None:
    for arguments in commands(line, "rollq"):
        group = Commands()
        command = group.get_command(click.Context(group), arguments[0])
        assert command is not None, arguments[0]
        with suppress(click.BadParameter, click.MissingParameter):  # a file that is not here
            command.make_context(arguments[0], arguments[1:], resilient_parsing=False)


def test_the_check_of_options_finds_one_that_does_not_exist() -> None:
    with pytest.raises(click.NoSuchOption):
        test_commands_of_rollq_have_these_options(ROOT, "rollq status --jsonn rollq.toml")


def test_extras_and_modules_that_commands_name_exist() -> None:
    extras = {
        extra for _, line in LINES for found in re.findall(r"rollq\[([\w,-]+)\]", line) for extra in found.split(",")
    }
    assert extras
    assert extras <= EXTRAS.keys()
    texts = [page.read_text("utf-8") for page in PAGES]
    modules = {name for text in texts for name in re.findall(r"python -m ((?:rollq|benchmarks|tests)[\w.]*)", text)}
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


NOT_RUN = {
    "containers": 3, "kubernetes": 4, "metrics": 1, "slurm-and-systemd": 2,  # need containers, or another machine
    "machines": 2, "gpus": 1, "trainer": 2, "trl": 1,  # other machines, GPUs, an installation, minutes
    "dashboard": 2, "watching": 1,  # a tunnel, an archive, a terminal
    "README": 1,  # an installation
}  # fmt: skip
"""Blocks that are marked `elsewhere`, by page: no other test of a page runs them as they are."""


def test_no_other_block_is_left_out_and_each_says_why() -> None:
    left_out = [(page.stem, block.detail) for page in PAGES for block in blocks(page) if block.mark == "elsewhere"]
    assert Counter(page for page, _ in left_out) == NOT_RUN
    assert all(detail for _, detail in left_out)


def shell(page: str, words: str) -> str:
    """The block of shell of a page of the guide with these words, without commands that need a network."""
    (code,) = [block.code for block in blocks(GUIDE / page) if block.language in SHELL and words in block.code]
    return "\n".join(line for line in code.splitlines() if not line.startswith("pip install"))


def python(page: str, words: str) -> str:
    """The block of Python of a page of the guide with these words."""
    (code,) = [block.code for block in blocks(GUIDE / page) if block.language == "python" and words in block.code]
    return code


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run Python of a page with these names; returns those that it leaves."""
    exec(compile(code, "a page", "exec"), names)  # noqa: S102 - it is ours
    return names


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, 6379)


@pytest.mark.long
def test_steering_and_queries_run(desk: Desk, fresh_server: EmbeddedServer) -> None:
    (desk.folder / "p.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (desk.folder / "rollq.toml").write_text(
        f'run = "r"\n[redis]\nbuffer_url = "{fresh_server.url}"\n[batch]\ngroups = 8\n'
        '[tasks.math]\nprompts = "p.jsonl"\n[tasks.code]\nprompts = "p.jsonl"\n'
    )
    with Buffer.connect(fresh_server.url, "r") as buffer:
        rules: dict[str, object] = {"batch_groups": 4, "weight": 1.0, "group_size": 2}
        World(buffer).start(math=rules, code=rules).complete(2)
        shown = desk.run(shell("steering.md", "rollq set math max_staleness=2"))
        assert "max_staleness" in shown
        assert buffer.clock("math").rules.max_staleness == 2
        desk.run(shell("steering.md", "rollq set math batch_groups=0"))
        assert "code" in buffer.tasks()


def test_a_custom_hook_ends_production() -> None:
    should_continue = run(python("strategies.md", "should_continue"))["should_continue"]
    state = TaskState(version=500, step=501, control="run", control_reason="", consumed=0, statuses={})
    assert should_continue(state) is False
    assert should_continue(replace(state, step=500)) is True


def test_arrays_are_stored_and_loaded(tmp_path: Path) -> None:
    code = python("arrays.md", "store_array").replace('"/shared/arrays"', repr(str(tmp_path)))
    routed = np.arange(6, dtype=np.int32).reshape(2, 3)
    (segment,) = make_sample(0).segments
    imports, lines = code.split("\n\n")
    store, load = lines.splitlines()
    stored = run(f"{imports}\n{store}", Path=Path, replace=replace, segment=segment, routed=routed)["segment"]
    assert np.array_equal(run(f"{imports}\n{load}", sequence=stored)["routed"], routed)


def test_a_batch_of_the_coordinator_is_finalized(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "r") as buffer, ThreadPoolExecutor() as pool:
        world = World(buffer).start(math={})

        def work() -> None:
            wait_until(lambda: bool(buffer.counts("math").statuses.get(Status.PENDING)))
            for lease in world.lease(1):
                world.put([lease])

        worked = pool.submit(work)
        names = run(python("../migration/from-trinity.md", "BatchCoordinator"), url=fresh_server.url, run="r")
        worked.result()
        assert names["result"] is not None


def test_the_parts_of_a_trainer_run_in_one(server_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pages show of a custom trainer, in the order of a step, with a real batch."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    names = run(python("machines.md", "SLURM_JOB_ID"), ConsumerSettings=ConsumerSettings, os=os, rank=0, world_size=1)
    model = tiny_qwen3()
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        buffer.register_task("math", TaskRules(batch_groups=2, group_size=2))
        with Consumer.connect(server_url, run=run_name, weights=model, settings=names["settings"]) as consumer:
            World(buffer).complete(2)
            names |= {"consumer": consumer, "model": model, "batch": next(consumer), "state_dict": model.state_dict()}
            run(python("losses.md", 'LossSettings(preset="gspo")\nfor micro'), **names)
            assert all(parameter.grad is not None for parameter in model.parameters())
            micro, terms = names["batch"].to_torch(), torch.ones(12, requires_grad=True)
            assert run(python("machines.md", "micro.counts"), micro=micro, terms=terms)["loss"] == 1
            names = run(python("weights.md", "import to_checkpoint_format"), **names)
            run(python("weights.md", "probe=probe_of"), **names)
            assert run(python("evaluation.md", "consumer.evaluate"), **names)["metrics"] == {}
            live = buffer.live_model()
            assert live is not None
            assert (live.version, buffer.clock("math").committed) == (1, 1)

"""docs/guide/own-loop.md and examples/loops: the trainers train in two ranks, and the one with checkpoints resumes."""

import re
from pathlib import Path

import pytest

from support.documented_commands import ROOT, Desk, code_with, files, terminals
from support.forked_ranks import run_script

PAGE = ROOT / "docs" / "guide" / "own-loop.md"
LOOPS = ROOT / "examples" / "loops"
SERVE, PRODUCE, WORK, *_ = terminals(ROOT / "README.md")


@pytest.fixture
def roles(desk: Desk, sums: Path) -> Desk:
    """The trainers, and all roles but a trainer."""
    config = sums / "rollq.toml"
    config.write_text(desk.local(config.read_text("utf-8")))
    linked = {path.name: path.read_text("utf-8") for path in LOOPS.glob("*.py")}
    for name, code in {**files(PAGE), **linked}.items():
        fewer = code.replace("STEPS, SAVE_EVERY = 20, 5", "STEPS, SAVE_EVERY = 3, 2").replace("step <= 20", "step <= 3")
        (desk.folder / name).write_text(desk.local(fewer))
    desk.open("redis", SERVE)
    desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
    desk.open("produce", PRODUCE)
    desk.open("work", WORK)
    return desk


def steps(output: str) -> list[int]:
    """The steps that a trainer has printed."""
    return [int(step) for step in re.findall(r"^step (\d+): reward \d\.\d+, gradient norm \d", output, re.MULTILINE)]


@pytest.mark.long
def test_loops_of_plain_pytorch_and_of_accelerate_train_in_two_ranks(roles: Desk) -> None:
    plain = code_with(PAGE, "plain.py")
    with roles:
        assert steps(run_script(roles.folder / "with_accelerate.py", 2)) == [1, 2, 3]
        assert steps(roles.run(plain)) == [1, 2, 3]
        script = roles.folder / "plain.py"
        script.write_text(script.read_text().replace("STEPS, SAVE_EVERY = 3", "STEPS, SAVE_EVERY = 4"))
        assert steps(run_script(script, 2)) == [4]


@pytest.mark.slow  # tests/consumer/test_streamed_training.py streams without this script
def test_a_loop_that_trains_while_the_batch_fills_trains_in_two_ranks(roles: Desk) -> None:
    with roles:
        assert steps(roles.run(code_with(PAGE, "2 streamed.py"))) == [1, 2, 3]


@pytest.mark.slow  # DeepSpeed compiles an operator, for a minute on both cores
@pytest.mark.usefixtures("cxx_compiler")
def test_a_loop_of_deepspeed_trains_in_two_ranks(roles: Desk) -> None:
    with roles:
        assert steps(roles.run(f"export DS_ACCELERATOR=cpu\n{code_with(PAGE, 'with_deepspeed.py')}")) == [1, 2, 3]

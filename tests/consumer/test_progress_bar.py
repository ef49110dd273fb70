"""The trainer's progress bar in a real terminal, and nothing of it elsewhere."""

import subprocess
import sys

from rollq.consumer.trainer.progress_bar import progress_bar
from support.terminal import terminal

TRAINER = """
import logging, sys
from rollq.cli.logs import set_up_logs
from rollq.consumer.trainer.progress_bar import progress_bar
set_up_logs("info", "text")
with progress_bar(40, 10, is_shown=True) as show:
    show(12, 0.5, 1234.5)
    logging.getLogger("rollq.consumer").info("a line of the log")
    input()
"""


def test_a_person_sees_the_step_the_reward_and_tokens_per_second_below_the_log() -> None:
    with terminal([sys.executable, "-c", TRAINER], 100, 10) as shown:
        text = shown.wait_for("12/40", "reward 0.500, 1,234 tokens/s", "a line of the log")
        assert text.index("a line of the log") < text.index("12/40")
        shown.press("\n")
        shown.process.wait(60)


def test_a_file_gets_only_the_log() -> None:
    command = [sys.executable, "-c", TRAINER.replace("    input()\n", "")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.endswith("rollq.consumer: a line of the log")


def test_ranks_other_than_the_first_show_nothing() -> None:
    with progress_bar(40, 0, is_shown=False) as show:
        show(1, 0.5, 10.0)

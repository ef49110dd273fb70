import sys
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.workers.agent_loops import make_loop


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "agent_options of agent loop 'harness': command: is required, but missing"),
        ({"command": []}, "command = []: must have at least 1 item"),
        ({"command": ["no-such-program", "-x"]}, "agent_options.command: 'no-such-program' is not on the PATH"),
        ({"command": [sys.executable], "workspace": "nowhere"}, "agent_options.workspace: 'nowhere' is not a folder"),
        (
            {"command": [sys.executable], "calls": "no.such.function"},
            "agent_options.calls: function 'no.such.function'",
        ),
        ({"command": [sys.executable], "tool_parser": "nothing"}, "agent_options.tool_parser 'nothing' "),
        ({"command": [sys.executable], "turns": 3}, "turns"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("harness", options)
    assert words in str(refused.value)


def test_a_program_of_the_workspace_need_not_be_on_the_path(tmp_path: Path) -> None:
    make_loop("harness", {"command": ["./agent"], "workspace": tmp_path})

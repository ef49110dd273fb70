"""Answers that no grader should reward, and texts that reveal a grader that runs text as code. Pure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUBBISH: Final = (
    "", " ", "nan", "inf", "-1e999", "1e999", "9**9**9**9", "I do not know.", "word", "0", "[]", "{}", "None", "True",
    "(" * 500, "\x00\ud7ff\U0001f984", "a" * 20_000, "<answer></answer>", "1/0", "\\boxed{}",
)  # fmt: skip
"""Twenty answers."""


def canaries(file: Path) -> Iterator[str]:
    """Texts that create `file` when run as Python, in forms that graders pass to `eval`."""
    call = f"open({str(file)!r}, 'w')"
    quoted = f'open("{file}", "w")'
    yield from (call, quoted, f"[[{call}]]", f"[{quoted}]", f"({call}) + 1", f"1 if {call} else 0")

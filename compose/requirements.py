"""Prints what an image needs, one requirement a line: the project's dependencies and its extras' dependencies.

python compose/requirements.py torch > requirements.txt
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
EXTRAS = {
    "base": ("images",),  # a producer checks images of prompts
    "archive": ("archive",),
    "dashboard": ("dashboard",),
    "torch": ("torch", "archive"),  # a trainer adds to the archive
    "vllm": ("vllm",),
}


def requirements(extra: str) -> list[str]:
    """Raises `SystemExit` for an extra that no image is made of."""
    if extra not in EXTRAS:
        raise SystemExit(f"EXTRAS={extra!r}: must be one of {', '.join(EXTRAS)}")
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(name for each in EXTRAS[extra] for name in optional[each])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))

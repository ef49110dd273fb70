"""Part of `make lint`: the scripts, styles and markup of the dashboard pass Biome, with `biome.json`.

Biome is installed from npm on first use.

Usage: python tests/page_style.py [--fix]
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIOME = "@biomejs/biome@2.6.8"
BIOME_FOLDER = ROOT / ".venv" / "biome"


def main(arguments: Sequence[str]) -> int:
    """Check the files, or format them with `--fix`. Without npm: an error in CI, a note elsewhere."""
    npm = shutil.which("npm")
    if npm is None:
        print("The dashboard's page is not checked: install Node.js with npm (Debian: apt-get install npm)")
        return int(os.environ.get("CI") == "true")
    tool = BIOME_FOLDER / "node_modules" / ".bin" / "biome"
    if not tool.exists():
        quiet = ["--silent", "--no-audit", "--no-fund"]
        subprocess.run([npm, "install", *quiet, "--prefix", str(BIOME_FOLDER), BIOME], check=True)
    command = [str(tool), "check", "--error-on-warnings", *(["--write"] if "--fix" in arguments else [])]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

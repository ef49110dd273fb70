"""Claude Code and Codex, the real programs, which are installed from npm on first use."""

import shutil
import subprocess
from pathlib import Path

from conftest import missing
from support.documented_commands import ROOT

PACKAGES = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
FOLDER = ROOT / ".venv" / "agents"


def programs() -> Path:
    """The folder of the programs `claude` and `codex`."""
    npm = shutil.which("npm")
    if npm is None:
        missing("no npm on the PATH (Debian: apt-get install npm)")
    folder = FOLDER / "node_modules" / ".bin"
    if not all((folder / program).exists() for program in ("claude", "codex")):
        quiet = ["--silent", "--no-audit", "--no-fund"]
        subprocess.run([npm, "install", *quiet, "--prefix", str(FOLDER), *PACKAGES], check=True)
    return folder

"""Other people's agents, which are installed on first use: Claude Code and Codex from npm, Python's clients from the
package index, each into an environment of its own."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import missing
from support.documented_commands import ROOT

PACKAGES = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
FOLDER = ROOT / ".venv" / "agents"
CLIENTS: Mapping[str, Sequence[str]] = {
    "langchain": ("langchain==1.*", "langchain-openai", "langgraph"),
    "agents": ("openai-agents<0.30",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.*",),
    "smolagents": ("smolagents[openai]==1.*",),
}
"""Packages of each of Python's clients."""


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


def python_with(client: str) -> str:
    """The Python of an environment with one of `CLIENTS`."""
    folder = ROOT / ".venv" / "clients" / client
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([str(folder / "bin" / "pip"), "install", *quiet, *CLIENTS[client]], check=True)
        (folder / "installed").touch()
    return str(folder / "bin" / "python")

"""Other people's agents, which are installed on first use: programs from npm, Python's clients from the package index,
each into a separate environment."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import missing
from support.documented_commands import ROOT

PACKAGES = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
FOLDER = ROOT / ".venv" / "agents"
CLIENTS_FOLDER = ROOT / ".venv" / "clients"
CLIENTS: Mapping[str, Sequence[str]] = {
    "langchain": ("langchain==1.*", "langchain-openai", "langgraph"),
    "agents": ("openai-agents<0.30",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.*",),
    "smolagents": ("smolagents[openai]==1.*",),
    "litellm": ("litellm==1.*",),
    "instructor": ("instructor==1.*",),
    "dspy": ("dspy==3.*",),
    "crewai": ("crewai==1.*",),
    "autogen": ("autogen-agentchat==0.7.*", "autogen-ext[openai]==0.7.*"),
    "ag2": ("ag2[openai]<1",),
    "llama_index": ("llama-index-core==0.14.*", "llama-index-llms-openai-like==0.8.*"),
    "agno": ("agno==3.*", "openai"),
    "strands": ("strands-agents[openai]==1.*",),
    "google_adk": ("google-adk==2.*", "litellm==1.*"),
    "inspect_ai": ("inspect-ai==0.3.*", "openai"),
    "mini_swe_agent": ("mini-swe-agent==2.*",),
}
"""Packages of each of Python's clients."""
NPM_CLIENTS: Mapping[str, Sequence[str]] = {
    "ai_sdk": ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
    "opencode": ("opencode-ai@1.18.33",),
    "qwen_code": ("@qwen-code/qwen-code@0.24.4",),
}
"""Packages of each client from npm."""


def programs() -> Path:
    """The folder of the programs `claude` and `codex`."""
    folder = FOLDER / "node_modules" / ".bin"
    if not all((folder / program).exists() for program in ("claude", "codex")):
        npm_install(FOLDER, PACKAGES)
    return folder


def node_modules(client: str) -> Path:
    """The folder with the packages of one of `NPM_CLIENTS`."""
    folder = CLIENTS_FOLDER / client
    if not (folder / "installed").exists():
        npm_install(folder, NPM_CLIENTS[client])
        (folder / "installed").touch()
    return folder / "node_modules"


def npm_install(folder: Path, packages: Sequence[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        missing("no npm on the PATH (Debian: apt-get install npm)")
    quiet = ["--silent", "--no-audit", "--no-fund"]
    subprocess.run([npm, "install", *quiet, "--prefix", str(folder), *packages], check=True)


def python_with(client: str) -> str:
    """The Python of an environment with one of `CLIENTS`."""
    folder = CLIENTS_FOLDER / client
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([str(folder / "bin" / "pip"), "install", *quiet, *CLIENTS[client]], check=True)
        (folder / "installed").touch()
    return str(folder / "bin" / "python")

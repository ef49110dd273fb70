"""Part of `make lint`: the Lua files pass luacheck, and are formatted as StyLua does.

luacheck reads the assembled library, since only there every name is defined. StyLua is installed from npm on first use.

Usage: python tests/lua_style.py [--fix]
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import rollq.buffer
from rollq.buffer.store import library

ROOT = Path(__file__).parent.parent
LUA = Path(rollq.buffer.__file__).parent / "lua"
STYLUA = "@johnnymorganz/stylua@2.5.2"
STYLUA_FOLDER = ROOT / ".venv" / "stylua"
MAX_LINE = 120


class Missing(Exception):
    """A tool that is not installed."""


def main(arguments: Sequence[str]) -> int:
    """Check the files, or format them with `--fix`. Without a tool: an error in CI, a note elsewhere."""
    paths = sorted(LUA.glob("*/*.lua"))
    failed = False
    for check in (lint, fix if "--fix" in arguments else check_format):
        try:
            found = list(check(paths))
        except Missing as error:
            found = []
            print(f"Lua files are not fully checked: {error}")
            failed |= os.environ.get("CI") == "true"
        print(*found, sep="\n", end="\n" if found else "")
        failed |= bool(found)
    return int(failed)


def lint(paths: Sequence[Path]) -> Iterator[str]:
    """Yield luacheck's warnings."""
    tool = shutil.which("luacheck")
    if tool is None:
        raise Missing("install luacheck (Debian: apt-get install lua-check; macOS: brew install luacheck)")
    source = library.library_source()
    begins = {source[: source.index(path.read_text())].count("\n"): path for path in paths}
    command = [tool, "-", "--std", "lua51", "--globals", "redis", "cjson", "--max-line-length", str(MAX_LINE)]
    done = subprocess.run([*command, "--formatter", "plain"], input=source, capture_output=True, text=True)
    if done.returncode > 2:
        raise RuntimeError(done.stderr)
    for line in done.stdout.splitlines():
        _, number, rest = line.split(":", 2)
        yield f"{_place(int(number), begins)}:{rest}"


def _place(line: int, begins: dict[int, Path]) -> str:
    """The file and line of a line of the library."""
    before = [begin for begin in begins if begin < line]
    if not before:
        return f"{Path(library.__file__).relative_to(ROOT)} (constants)"
    return f"{begins[max(before)].relative_to(ROOT)}:{line - max(before)}"


def check_format(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the files that are not formatted."""
    return _stylua("--check", *map(str, paths))


def fix(paths: Sequence[Path]) -> Iterator[str]:
    """Format the files, and yield those that had to be."""
    return _stylua(*map(str, paths))


def _stylua(*arguments: str) -> Iterator[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Missing("install Node.js with npm (Debian: apt-get install npm), which runs StyLua")
    if not (STYLUA_FOLDER / "node_modules").exists():
        quiet = ["--silent", "--no-audit", "--no-fund"]
        subprocess.run([npm, "install", *quiet, "--prefix", str(STYLUA_FOLDER), STYLUA], check=True)
    command = [node, str(ROOT / "tests" / "stylua.mjs"), *arguments]
    environment = {**os.environ, "NODE_PATH": str(STYLUA_FOLDER / "node_modules")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode > 1:
        raise RuntimeError("StyLua failed")
    yield from done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

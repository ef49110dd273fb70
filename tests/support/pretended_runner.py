"""Pretends to be a Python with verifiers, whose runner rewards every session: for tests of the runners' processes.

How it ends is in the file `ends` beside it: "start", before it asks for a session, or "session", once it has one.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {folder!r})
from pretended_runner import main
main()
"""


def pretended_python(folder: Path, ends: str = "", version: str = "0.4.7") -> Path:
    """A program that looks like a Python with verifiers."""
    info = folder / "lib" / "python3.11" / "site-packages" / f"verifiers-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(SCRIPT.format(python=sys.executable, folder=os.path.dirname(__file__)))
    python.chmod(0o755)
    (python.parent / "ends").write_text(ends)
    return python


def ask(url: str, key: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def main() -> None:
    arguments = sys.argv[3:]  # after -c and its program, whose first argument is a folder
    gateway = arguments[arguments.index("--gateway") + 1]
    key = sys.stdin.readline().strip()
    ends = (Path(sys.argv[0]).parent / "ends").read_text()
    if ends == "start":
        sys.exit("there is no task set of this name")
    while True:
        try:
            session = ask(f"{gateway}/sessions", key, {"wait_s": 5})
        except urllib.error.HTTPError:
            continue
        if ends == "session":
            (Path(sys.argv[0]).parent / "pid").write_text(str(os.getpid()))
            time.sleep(3600)
        message = {"role": "user", "content": session["prompt"]}
        ask(session["session_url"] + "/v1/chat/completions", session["token"], {"model": "m", "messages": [message]})
        body = {"reward": 0.5, "truncated": True, "extra": {"environment": session["environment"]}}
        ask(session["session_url"] + "/reward", session["reward_token"], body)

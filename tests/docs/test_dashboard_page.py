"""docs/guide/dashboard.md: its commands serve the page of a run, and the token allows changes."""

import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import orjson
import pytest

from rollq.buffer.common.ports import free_port
from support.documented_commands import ROOT, Desk, code_with, terminals

PAGE = ROOT / "docs" / "guide" / "dashboard.md"
SERVE, PRODUCE, *_ = terminals(ROOT / "README.md")


@pytest.mark.usefixtures("openssl")
def test_the_dashboard_serves_a_run_and_takes_changes_with_the_token(desk: Desk, sums: Path) -> None:
    config = sums / "rollq.toml"
    config.write_text(desk.local(config.read_text("utf-8")))
    reading, changing = [
        code_with(PAGE, words)
        .replace("pip install", "true pip install")
        .replace("rollq dashboard", "exec rollq dashboard")
        for words in ("pip install", "openssl")
    ]
    with desk:
        desk.open("redis", SERVE)
        desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
        desk.open("produce", PRODUCE)
        for name, code in (("reading", reading), ("changing", changing)):
            port = free_port("127.0.0.1")
            desk.open(name, code.replace("rollq.toml", f"rollq.toml --port {port}"))
            desk.wait_until(partial(serves, port))
        token = (desk.folder / "token.txt").read_text().strip()
        order = {"order": "pause", "kind": "run", "name": "", "dry_run": True}
        assert changed(port, order, token) == 200
        assert changed(port, order, "another") in (401, 403)


def serves(port: int) -> bool:
    """Whether the dashboard shows the run."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status") as answer:
            return bool(orjson.loads(answer.read()))
    except (urllib.error.URLError, ConnectionError):
        return False


def changed(port: int, order: dict[str, object], token: str) -> int:
    """The status of the answer to an order."""
    url = f"http://127.0.0.1:{port}/api/changes"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, orjson.dumps(order), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code

"""`rollq dashboard`, from its API: a real run, one with 10,000 groups, a server that goes, and changes with a token."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.query.selection import MOST_READ, MOST_ROWS
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus
from rollq.cli.commands.dashboard import token_texts
from rollq.cli.main import main
from rollq.monitor.dashboard.groups import FIRST_TOKENS, MOST_TOKENS
from support.buffer_run import World
from support.dashboard import HOSTILE, REPORT, TOKEN, fill, put, remember, serving, written
from support.trained_run import MISMATCH, archive_many, train_annotated
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forks")

MANY = 10_000


def ask(address: str, **parameters: object) -> tuple[int, Any]:
    """The status of the answer, and its JSON."""
    return send(urllib.request.Request(f"{address}?{urlencode(parameters)}"))


def send(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        body = error.read().decode()
        return error.code, json.loads(body) if body.startswith("{") else body


def change(address: str, token: str = TOKEN, **body: object) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = json.dumps({"order": "pause", "kind": "task", "name": "math", "dry_run": True, **body}).encode()
    return send(urllib.request.Request(f"{address}/api/changes", data, headers))


def events(address: str) -> Iterator[tuple[str, Any]]:
    """Server-sent events: name and data."""
    with urllib.request.urlopen(f"{address}/api/events", timeout=60) as answer:
        name = "message"
        for line in answer:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
                name = "message"


def all_groups(address: str, **parameters: object) -> tuple[list[tuple[str, int]], int]:
    """Every group of a selection, page by page, and the number of pages."""
    found: list[tuple[str, int]] = []
    after: str | None = ""
    pages = 0
    while after is not None:
        status, page = ask(f"{address}/api/groups", after=after, **parameters)
        assert status == 200, page
        found += [(row["task"], row["group"]) for row in page["groups"]]
        after, pages = page["after"], pages + 1
    return found, pages


def test_a_run_is_served_as_rollq_status_shows_it(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={}, code={})
    fill(world, 3)
    remember(buffer, "math", 20)
    buffer.report_worker("worker-1", REPORT)
    with serving("--url", server_url, "--run", buffer.run) as address:
        _, status = ask(f"{address}/api/status")
        shown = CliRunner().invoke(main, ["status", "--url", server_url, "--run", buffer.run, "--json"])
        printed = json.loads(shown.output)
        assert status.keys() == printed.keys()
        assert status["diagnosis"]["state"] == printed["diagnosis"]["state"] == "training"
        assert [task["statuses"] for task in status["tasks"]] == [task["statuses"] for task in printed["tasks"]]
        assert next(events(address))[1]["diagnosis"] == status["diagnosis"]
        code, history = ask(f"{address}/api/history", minutes=10)
        assert code == 200
        assert history["math"]["tokens"][-1] == pytest.approx(880)
        assert history["math"]["reward"][-1] == 0.25
        assert history["code"]["at_ms"] == []
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            assert b"rollq_up" in answer.read()
        with urllib.request.urlopen(f"{address}/healthz", timeout=60) as answer:
            assert answer.read() == b"ok\n"
        assert ask(f"{address}/api/about")[1]["may_change"] is False
        assert ask(f"{address}/api/history", minutes="x")[0] == 400


def test_a_group_is_served_with_the_values_of_each_token(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={"max_staleness": 4})
    text = HOSTILE + "x" * 30_000
    number = put(world, written(text, versions=(0, 0)), written("short", talks=True))
    with serving("--url", server_url, "--run", buffer.run) as address:
        _, group = ask(f"{address}/api/groups/math/{number}")
        long, short = group["samples"]
        (part,) = long["parts"]
        assert len(part["ids"]) == len(part["versions"]) == len(part["counts"]) == len(part["logprobs"]) == FIRST_TOKENS
        assert long["tokens"] == len(text.encode())
        assert long["text"] == text
        assert part["pieces"] is None
        assert "ids" in group["texts"]
        assert "has not trained this group" in group["annotations"]
        assert short["reward_parts"] == {"exact": 0.5, "format": 0.125}
        assert [turn["role"] for turn in short["turns"]] == ["assistant", "tool", "assistant"]
        assert short["turns"][1]["text"] == HOSTILE
        assert group["events"][0]["text"] == "admitted for step 1"
        tokens = f"{address}/api/groups/math/{number}/tokens"
        (more,) = ask(tokens, sample=0, start=29_990, count=10**6)[1]["parts"]
        assert more["ids"] == list(text.encode())[29_990:]
        assert more["start"] == 29_990
        (bounded,) = ask(tokens, sample=0, count=10**6)[1]["parts"]
        assert len(bounded["ids"]) == MOST_TOKENS
        assert ask(tokens, sample=2)[0] == 400
        assert ask(f"{address}/api/groups/math/99")[0] == 404
        assert ask(f"{address}/api/groups/{quote('a/b')}/1")[0] == 404


@pytest.mark.long
def test_ten_thousand_groups_are_read_by_the_page(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={"max_staleness": 4}, code={"max_staleness": 4})
    fill(world, MANY)
    fill(world, 5, "code")
    failed = put(world, *[Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error=HOSTILE)] * 2)
    world.claim(1, math=2, code=2)
    with serving("--url", server_url, "--run", buffer.run) as address:
        groups = f"{address}/api/groups"
        _, page = ask(groups, task="math", limit=10**6)
        assert (len(page["groups"]), page["read"]) == (MOST_ROWS, MOST_ROWS)
        found, _ = all_groups(address, limit=MOST_ROWS)
        assert len(found) == len(set(found)) == MANY + 6
        _, page = ask(groups, task="math", q="answer 77")
        assert page["read"] == MOST_READ
        found, pages = all_groups(address, task="code", q="ANSWER 5", limit=3)
        assert (found, pages) == ([("code", 5)], 1)
        found, _ = all_groups(address, task="code", prompt="CODE 3")
        assert found == [("code", 4)]
        assert sorted(all_groups(address, step=1)[0]) == [("code", 1), ("code", 2), ("math", 1), ("math", 2)]
        assert all_groups(address, step=1, task="code", status="claimed")[0] == [("code", 1), ("code", 2)]
        assert all_groups(address, step=1, status="failed")[0] == []
        _, page = ask(groups, status="failed")
        assert [(row["group"], row["error"][: len(HOSTILE)]) for row in page["groups"]] == [(failed, HOSTILE[:200])]
        for wrong in ({"task": "none"}, {"status": "none"}, {"after": "1.x"}, {"step": "0"}, {"limit": "-1"}):
            assert ask(groups, **wrong)[0] == 400


def test_groups_are_filtered_and_sorted_by_their_samples(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={"max_staleness": 4}, code={"max_staleness": 4})
    put(world, written("right", reward=1.0), written("wrong" * 30, reward=0.0))
    put(world, written("wrong" * 50, reward=0.0), written("no", reward=0.25))
    put(world, written("right" * 70, reward=1.0), written("x", reward=1.0), task="code")
    put(world, *[Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="no memory")] * 2)
    with serving("--url", server_url, "--run", buffer.run) as address:
        groups = f"{address}/api/groups"

        def listed(**given: object) -> list[tuple[str, int]]:
            _, page = ask(groups, **given)
            assert (page["partial"], page["note"]) == (False, "")
            return [(row["task"], row["group"]) for row in page["groups"]]

        assert listed(sort="-tokens") == [("code", 1), ("math", 2), ("math", 1), ("math", 3)]
        assert listed(sort="-tokens", max_reward=0.2) == [("math", 2), ("math", 1)]
        assert listed(max_reward=0.2, max_tokens=200) == [("math", 1)]
        assert listed(min_reward=0.5, finish="stop", task="math") == [("math", 1)]
        assert listed(finish="length,abort") == []
        assert listed(sort="reward")[:2] == [("math", 2), ("math", 1)]
        assert listed(sort="-at", status="failed") == [("math", 3)]
        assert listed(sort="-tokens", max_reward=0.2, q="wrong")[0] == ("math", 2)
        _, page = ask(groups, sort="-tokens", max_reward=0.2, limit=1)
        (row,) = page["groups"]
        assert row["samples"] == [[0, 0.0, 250, "stop", True, True], [1, 0.25, 2, "stop", True, False]]
        assert (row["min_reward"], row["max_reward"], row["tokens"], row["archived"]) == (0.0, 0.25, 250, False)
        assert listed(sort="-tokens", max_reward=0.2, limit=1, after=page["after"]) == [("math", 1)]
        _, page = ask(groups, sort="-tokens", status="failed")
        assert page["groups"][0]["samples"] == [[index, None, 0, None, False, True] for index in range(2)]
        for wrong in ({"sort": "colour"}, {"finish": "none"}, {"min_reward": "x"}, {"min_reward": "nan"}):
            assert ask(groups, **wrong)[0] == 400


def test_the_list_of_a_live_run_continues_in_its_archive(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    world = World(buffer).start(math={"archive": True, "max_staleness": 9})
    file, folder = tmp_path / "rollq.toml", tmp_path / "archive"
    file.write_text(
        f'run = "{buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n[archive]\nurl = "archive"\n'
        '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    )

    def train(step: int) -> None:
        put(world, written("right", reward=1.0), written("wrong" * 10 * step, reward=0.0))
        put(world, written("right" * 60, reward=1.0), written("wrong" * step, reward=0.0))
        world.train(step)

    def archive() -> None:
        done = CliRunner().invoke(main, ["archive", str(file), "--finish"])
        assert done.exit_code == 0, done.output

    train(1)
    with serving(str(file)) as address:
        groups = f"{address}/api/groups"
        _, page = ask(groups)
        assert (len(page["groups"]), "there is no such folder on this machine" in page["note"]) == (2, True)
        folder.mkdir()
        assert ask(groups)[1]["note"] == ""
        world.buffer.checkpoint(world.held, 1)
        leaving = ask(groups, step=1)[1]["groups"]
        assert [(row["status"], row["archived"]) for row in leaving] == [("leaving", False)] * 2
        archive()
        wait_until(lambda: len(ask(groups, step=1)[1]["groups"]) == 2)
        train(2)
        everything, _ = all_groups(address)
        assert sorted(everything) == [("math", number) for number in range(1, 5)]
        assert sorted(all_groups(address, limit=1)[0]) == sorted(everything)
        assert [row["archived"] for row in ask(groups)[1]["groups"]] == [False, False, True, True]
        wrong = {"sort": "-tokens", "max_reward": 0.2}
        assert all_groups(address, **wrong)[0] == [("math", number) for number in (3, 1, 4, 2)]
        assert all_groups(address, limit=1, **wrong)[0] == [("math", number) for number in (3, 1, 4, 2)]
        assert all_groups(address, step=1, **wrong)[0] == [("math", 1), ("math", 2)]
        assert all_groups(address, status="completed")[0] == []
        _, group = ask(f"{groups}/math/1")
        assert group["events"][-1]["text"] == "is in the archive"
        world.buffer.checkpoint(world.held, 2)
        archive()
        wait_until(lambda: sorted(all_groups(address, **wrong)[0]) == sorted(everything))
        assert all(row["archived"] for row in ask(groups)[1]["groups"])


def test_groups_of_the_same_prompt_are_found(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={"max_staleness": 4})
    prompts = [(Prompt(f"prompt {place % 3}", row=place % 3), place + 1) for place in range(7)]
    buffer.admit("math", prompts, epoch=1, cursor=0, target=100, step=1)
    world.put(world.lease(7))
    plain = put(world, written("a"), written("b"))
    with serving("--url", server_url, "--run", buffer.run) as address:
        _, page = ask(f"{address}/api/groups", prompt_of="math/2")
        assert sorted(row["group"] for row in page["groups"]) == [2, 5]
        _, page = ask(f"{address}/api/groups", prompt_of="math/1", limit=2)
        assert (len(page["groups"]), page["after"]) == (2, "0.2")
        status, page = ask(f"{address}/api/groups", prompt_of=f"math/{plain}")
        assert (status, page["groups"]) == (200, [])
        assert "no row" in page["note"]
        assert ask(f"{address}/api/groups", prompt_of="math/99")[0] == 404


def test_a_server_that_goes_is_said_and_it_recovers(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        fill(World(buffer).start(math={}), 1)
    with serving("--url", fresh_server.url, "--run", "sums") as address:
        followed = events(address)
        assert next(followed)[0] == "message"
        fresh_server.stop()
        assert any(name == "lost" and data for name, data in followed)
        assert ask(f"{address}/api/groups")[0] == 503
        assert ask(f"{address}/api/status")[0] == 503
        with urllib.request.urlopen(f"{address}/", timeout=60) as page:
            assert b"<title>rollq</title>" in page.read()
        fresh_server.start()
        assert any(name == "message" for name, _ in followed)
        wait_until(lambda: ask(f"{address}/api/groups")[0] == 200)


def test_changes_need_the_token_and_a_dry_run_changes_nothing(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={}, code={})
    buffer.report_worker("worker-1", REPORT)
    with serving("--url", server_url, "--run", buffer.run, token=TOKEN) as address:
        for token in ("", "wrong", TOKEN + "x"):
            assert change(address, token, dry_run=False)[0] == 403
        _, preview = change(address)
        assert (preview["is_possible"], preview["done"]) == (True, [])
        assert "run -> pause" in preview["text"]
        assert buffer.clock("math").control is Control.RUN
        _, done = change(address, dry_run=False)
        assert done["done"] == ["task math: run -> pause"]
        assert (buffer.clock("math").control, buffer.clock("code").control) == (Control.PAUSE, Control.RUN)
        change(address, order="run", kind="run", name="", dry_run=False)
        assert buffer.clock("math").control is Control.RUN
        _, drained = change(address, order="drain", kind="worker", name="worker-1", dry_run=False)
        assert drained["done"] == ["worker worker-1: drain"]
        assert buffer.report_worker("worker-1", REPORT).value == "drain"
        group = {"order": "drop", "kind": "group"}
        for wrong in (
            *({"order": "explode"}, {"kind": "planet"}, {"name": "none"}, {"kind": "worker"}),
            *({**group, "name": f"math/{number}"} for number in ("9" * 4301, "\u00b2", "-1", "")),
        ):
            assert change(address, **wrong)[0] == 400
    with serving("--url", server_url, "--run", buffer.run) as address:
        assert "only reads" in change(address)[1]["error"]


def test_a_group_is_moved_by_hand_with_the_token_and_after_a_dry_run(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={})
    fill(world, 3)
    with serving("--url", server_url, "--run", buffer.run, token=TOKEN) as address:
        assert change(address, "wrong", kind="group", name="math/1", order="drop")[0] == 403
        for order in GroupOrder:
            _, preview = change(address, kind="group", name="math/1", order=order)
            assert (preview["is_possible"], preview["done"]) == (True, [])
            assert preview["text"].startswith("completed -> ")
        assert world.statuses() == {"completed": 3}
        _, done = change(address, kind="group", name="math/1", order="quarantine", dry_run=False)
        assert done["done"][0].startswith("math 1: completed -> failed.")
        change(address, kind="group", name="math/2", order="drop", dry_run=False)
        change(address, kind="group", name="math/1", order="requeue", dry_run=False)
        assert world.statuses() == {"pending": 1, "completed": 1}
        _, refused = change(address, kind="group", name="math/1", order="requeue", dry_run=False)
        assert (refused["is_possible"], refused["done"][0][:24]) == (False, "math 1: Nothing changes:")
        for wrong in ({"name": "none/1"}, {"name": "math"}, {"name": "math/x"}, {"order": "pause"}):
            assert change(address, **{"kind": "group", "name": "math/1", "order": "drop", **wrong})[0] == 400
    world.check()


def test_a_change_without_a_length_is_bounded_too(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={})
    with serving("--url", server_url, "--run", buffer.run, token=TOKEN) as address:
        headers = {"Authorization": f"Bearer {TOKEN}", "Transfer-Encoding": "chunked"}
        parts = (
            b'{"order": "pause", ',
            b" " * 9_000,
            b" " * 9_000,
            b'"kind": "task", "name": "math", "dry_run": false}',
        )
        asked = urllib.request.Request(f"{address}/api/changes", iter(parts), headers)
        assert send(asked) == (413, {"error": "the request is too long"})
        assert buffer.clock("math").control is Control.RUN


def test_what_a_trainer_wrote_beside_the_archive_is_served_with_the_tokens(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "rollq.toml").write_text(
        f'run = "{buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n[archive]\nurl = "{tmp_path / "archive"}"\n'
        '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\n'
        'max_tokens = 64\n[worker]\nengine = "simulated"\n'
    )
    world = World(buffer).start(math={"max_staleness": 4})
    for at in range(3):
        put(world, written("a" * 900, reward=at), written("short", reward=1))
    step = train_annotated(server_url, buffer.run, tmp_path / "archive", tmp_path)
    with serving(str(tmp_path / "rollq.toml")) as address:
        while "does not answer" in (group := ask(f"{address}/api/groups/math/1")[1])["annotations"]:
            pass  # a busy machine takes its time to import what reads the archive
        assert (group["annotations"], group["step"]) == ("", step)
        (part,) = group["samples"][0]["parts"]
        assert part["annotations"].keys() == {"mismatch", "trainer logprob", "ratio", "clipped"}
        for column in part["annotations"].values():
            assert [value is not None for value in column] == part["counts"]
        trained, worker = part["annotations"]["trainer logprob"], part["logprobs"]
        assert trained[599] == pytest.approx(worker[599] + MISMATCH)
        assert part["annotations"]["clipped"][0] in (True, False)
        assert group["samples"][0]["advantage"] < 0 < group["samples"][1]["advantage"]
        (rest,) = ask(f"{address}/api/groups/math/1/tokens", sample=0, start=890)[1]["parts"]
        assert rest["annotations"]["mismatch"] == [MISMATCH] * 10
        assert "has not trained" in ask(f"{address}/api/groups/math/3")[1]["annotations"]
        (file,) = (tmp_path / "archive").rglob("step-*.parquet")
        file.write_bytes(b"not parquet")
        _, broken = ask(f"{address}/api/groups/math/2")
        assert "cannot be read" in broken["annotations"]
        assert broken["samples"][0]["parts"][0]["annotations"] == {}
    with serving("--url", server_url, "--run", buffer.run) as address:
        assert "that sets url in [archive]" in ask(f"{address}/api/groups/math/1")[1]["annotations"]


@pytest.mark.long
def test_an_archive_is_served_without_a_server(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        archive_many(buffer, tmp_path / "archive", 1000, 50)
    fresh_server.stop()
    with serving("--archive", str(tmp_path / "archive" / "sums")) as address:
        _, about = ask(f"{address}/api/about")
        assert (about["run"], about["may_change"], about["archive"]["tasks"]) == ("sums", False, ["math"])
        found, pages = all_groups(address, limit=MOST_ROWS)
        assert (len(set(found)), pages) == (1000, 5)
        assert sorted(all_groups(address, step=3)[0]) == [("math", number) for number in range(101, 151)]
        assert all_groups(address, q="answer 999")[0] == [("math", 999)]
        _, group = ask(f"{address}/api/groups/math/7")
        assert group["samples"][1]["text"] == "answer 7"
        assert group["status"] == "archived"
        assert "no trainer's values" in group["annotations"]
        assert ask(f"{address}/api/groups/math/5000")[0] == 404
        assert ask(f"{address}/api/groups", status="running")[0] == 400
        assert ask(f"{address}/api/status")[0] == 404
    both = CliRunner().invoke(main, ["dashboard", "--archive", str(tmp_path), "--url", "redis://a", "--run", "b"])
    assert (both.exit_code, "leave out --url, --run and --token-file" in both.output) == (2, True)


def test_a_request_in_anothers_name_gets_nothing(buffer: Buffer, server_url: str) -> None:
    World(buffer).start()
    with serving("--url", server_url, "--run", buffer.run) as address:
        request = urllib.request.Request(f"{address}/api/status", headers={"Host": "evil.example"})
        assert send(request)[0] == 421


def test_a_token_that_is_easy_to_guess_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    command = ["dashboard", "--url", "redis://127.0.0.1:1/0", "--run", "sums", "--token-file"]
    short = CliRunner().invoke(main, [*command, str(tmp_path / "token")])
    assert short.exit_code == 2
    assert "needs 16 characters or more" in short.output
    missing = CliRunner().invoke(main, [*command, str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rollq.monitor.dashboard.app", None)
    done = CliRunner().invoke(main, ["dashboard", "--url", "redis://127.0.0.1:1/0", "--run", "sums"])
    assert done.exit_code == 2
    assert "pip install 'rollq[dashboard]'" in done.output


def test_the_tokenizer_of_the_settings_gives_tokens_their_text(prepared_demo: Path) -> None:
    texts = token_texts(prepared_demo / "rollq.toml")
    assert texts.decode is not None
    assert "tokenizer.json" in texts.note
    assert "".join(texts.decode([token]) for token in range(20, 24))
    assert token_texts(None).decode is None


def test_numbers_that_are_not_those_of_a_group_are_refused(buffer: Buffer, server_url: str) -> None:
    fill(World(buffer).start(math={}), 1)
    with serving("--url", server_url, "--run", buffer.run) as address:
        for number in ("9" * 4301, "9" * 16, "x", "-1", "%C2%B2"):
            assert ask(f"{address}/api/groups/math/{number}")[0] == 404
            assert ask(f"{address}/api/groups/math/{number}/tokens")[0] == 404
            assert ask(f"{address}/api/groups?limit={number}")[0] == 400
        assert ask(f"{address}/api/groups/math/{'9' * 15}")[0] == 404


def test_curves_are_served_from_the_server_and_from_files_once_it_is_gone(tmp_path: Path) -> None:
    output = tmp_path / "trained"
    output.mkdir()
    (output / "metrics.jsonl").write_text(json.dumps({"step": 1, "time_s": 5.0, "reward": 0.125}) + "\n")
    with EmbeddedServer(tmp_path / "server") as server, Buffer.connect(server.url, "sums") as buffer:
        (tmp_path / "rollq.toml").write_text(
            f'run = "sums"\n[redis]\nbuffer_url = "{server.url}"\n'
            '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\n'
            f'max_tokens = 64\n[worker]\nengine = "simulated"\n'
            f'[trainer]\nmodel = "model"\noutput = "{output}"\nsteps = 9\n'
        )
        world = World(buffer).start(math={})
        with serving(str(tmp_path / "rollq.toml")) as address:
            buffer.report_trainer(world.held, {"step": 1, "reward": 0.25, "rewards": {"math": 0.25}})
            status, found = ask(f"{address}/api/curves")
            assert (status, found["source"], found["steps"]) == (200, "server", [1])
            assert found["series"] == {"reward": [0.25], "rewards/math": [0.25]}
            assert found["curves"][0]["lines"] == ["reward", "rewards/math"]
            with Buffer.connect(server.url, "other") as second:
                other = World(second).start(math={})
                second.report_trainer(other.held, {"step": 7, "reward": 0.5})
            assert ask(f"{address}/api/runs") == (200, {"runs": ["other", "sums"]})
            assert ask(f"{address}/api/curves", run="other")[1]["steps"] == [7]
            assert ask(f"{address}/api/curves", run="absent")[0] == 503
            assert ask(f"{address}/api/curves", run="{x}:y")[0] == 400
            server.stop()
            wait_until(lambda: ask(f"{address}/api/curves")[1].get("source") == "files")
            assert ask(f"{address}/api/curves")[1]["series"] == {"reward": [0.125]}

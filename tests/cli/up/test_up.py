"""`rollq up`, with real roles and servers: it trains to the end, says why it cannot, and leaves nothing behind."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.up.run import alone_in
from rollq.cli.up.server import embedded_place
from support.up_process import UpProcess
from support.waiting import wait_until

Make = Callable[..., UpProcess]
FEW = {"steps = 150": "steps = 3"}
CALLS = {"[trainer]": '[monitor]\non_change = ["sh", "-c", "cat >> calls.jsonl"]\n[trainer]'}
MANY = {"steps = 150": "steps = 100000"}


@pytest.fixture
def make(prepared_demo: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[UpProcess] = []

    def up(*options: str, **changes: str) -> UpProcess:
        made.append(UpProcess(prepared_demo, tmp_path / "run", *options, **changes))
        made[-1].start()
        return made[-1]

    yield up
    for process in made:
        process.process.kill()
        process.process.wait()


def leaves_nothing(up: UpProcess) -> None:
    wait_until(lambda: up.pids() == [])


def test_it_trains_to_the_end_with_a_server_and_two_workers_one_of_which_is_killed(make: Make) -> None:
    up = make("--workers", "2", **FEW, **CALLS)
    up.wait_until(lambda: len(up.pids("work")) == 2)
    up.kill("work")
    assert up.end() == 0, up.text()
    text = up.text()
    assert f"server: redis://127.0.0.1:{up.port}/0 (started here, data in {up.folder / 'server'})" in text
    assert f"roles: trainer, producer, worker-1, worker-2; logs in {up.folder / 'logs'}" in text
    assert "died (SIGKILL) and was restarted" in text
    assert "\ntrained 3 of 3 steps in " in text
    last = json.loads((up.folder / "calls.jsonl").read_text("utf-8").splitlines()[-1])
    assert (last["state"], last["sentence"]) == ("finished", "the trainer has ended after step 3")
    assert {path.name for path in (up.folder / "logs").iterdir()} == {
        f"{name}.log" for name in ("trainer", "producer", "worker-1", "worker-2", "on_change")
    }
    leaves_nothing(up)


@pytest.mark.long
def test_a_server_that_answers_is_used_and_stays(make: Make, fresh_server: EmbeddedServer) -> None:
    up = make(**FEW, **{"buffer_url = ": f'buffer_url = "{fresh_server.url}"\n#'})
    assert up.end() == 0, up.text()
    assert f"server: {fresh_server.url} (it runs already)" in up.text()
    assert fresh_server.running
    assert not (up.folder / "server").exists()
    leaves_nothing(up)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["while it starts", "while it trains"])
def test_ctrl_c_stops_all_roles_and_the_same_command_continues(make: Make, moment: str) -> None:
    up = make(**MANY)
    up.wait_until(lambda: up.steps() > 0 if moment == "while it trains" else len(up.pids("work")) > 0)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 130, up.text()
    assert f"stopped; `rollq up {up.file}` continues" in up.text()
    leaves_nothing(up)
    if moment == "while it trains":
        assert "stopped after step" in (up.folder / "logs" / "trainer.log").read_text()
        steps = up.steps()
        up.start()
        up.wait_until(lambda: up.steps() > steps)


def test_it_takes_its_processes_along_when_it_is_killed(make: Make) -> None:
    up = make(**MANY)
    up.wait_until(lambda: len(up.pids("work")) > 0 and len(up.pids("train")) > 0)
    up.process.kill()
    up.process.wait()
    leaves_nothing(up)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"[producer]": "[producr]"}, "producr: unknown key"),
        ({"sum.jsonl": "none.jsonl"}, "none.jsonl' cannot be read"),
        ({'model = "model"': 'model = "another"'}, "model: cannot read "),
        ({'device = "cpu"': 'device = "cuda:99"'}, "device = 'cuda:99': torch does not find this GPU"),
        ({"[producer]": '[archive]\nurl = "archive"\n[producer]'}, "archive': there is no such folder on this machine"),
        ({'judge = "exact_match"': 'judge = "rewards.nothing"'}, "rewards"),
        ({'output = "trainer"': 'output = "rollq.toml/trainer"'}, "rollq.toml': cannot be written: File exists"),
        ({"redis://127.0.0.1": "redis://192.0.2.1.invalid"}, "`rollq up` starts a server only at a URL such as"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(make: Make, changes: dict[str, str], message: str) -> None:
    up = make(**changes)
    assert up.end() in (1, 2)
    assert message in up.text()
    assert "Traceback" not in up.text()
    assert list((up.folder / "logs").iterdir()) == []
    assert not (up.folder / "server").exists()


@pytest.mark.long
def test_a_role_that_refuses_its_settings_ends_it_with_its_reason_and_status(make: Make) -> None:
    up = make(**{'[worker.options]\nmodel = "model"': '[worker.options]\nmodel = "model"\nnonsense = 1'})
    assert up.end() == 2, up.text()
    assert "error: worker-1 refuses its settings; the end of " in up.text()
    assert "nonsense" in up.text()
    leaves_nothing(up)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://127.0.0.1:6379/0", ("127.0.0.1", 6379)),
        ("redis://localhost", ("127.0.0.1", 6379)),
        ("redis://:secret@[::1]:7000/2", ("::1", 7000)),
        ("redis://worker@localhost:6379", None),
        ("rediss://localhost:6379", None),
        ("unix:///run/redis.sock", None),
        ("redis://10.0.0.1:6379", None),
        ("redis://store:6379", None),
        ("redis://127.0.0.1:7000,127.0.0.1:7001/0", None),
    ],
)
def test_a_server_is_started_only_where_clients_can_reach_it_on_this_machine(
    url: str, place: tuple[str, int] | None
) -> None:
    assert embedded_place(url) == place


@pytest.mark.parametrize("folder", ["file/run", "run"])
def test_a_folder_that_cannot_be_written_is_named_with_its_setting(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / "up.lock").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match=r"^\[trainer\] output '.*run': cannot be written: (Not|Is) a directory$"),
        alone_in(tmp_path / folder, "[trainer] output", "up"),
    ):
        pass


def test_a_command_whose_folder_is_in_use_names_the_command_that_uses_it(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path, "--out", "evaluate"),
        pytest.raises(ConfigError, match=r"^another `rollq evaluate` runs in .*: stop it"),
        alone_in(tmp_path, "--out", "evaluate"),
    ):
        pass

"""`rollq metrics` calls a command when the state of a run changes: once for two of them, and it may hang."""

import json
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.cli.main import main
from support.buffer_run import World
from support.dashboard import serving
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forks")


def settings(buffer: Buffer, url: str, folder: Path, *command: str) -> str:
    (folder / "p.jsonl").write_text('{"prompt": "p"}\n')
    file = folder / "rollq.toml"
    file.write_text(
        f'run = "{buffer.run}"\n[redis]\nbuffer_url = "{url}"\n[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 4\n'
        f"group_size = 2\n[monitor]\non_change = {json.dumps(command)}\non_change_after_s = 0.0\n"
    )
    return str(file)


def end(world: World, phase: str) -> None:
    """Have the trainer end in some way, after which no state changes by itself."""
    world.buffer.renew_trainer(
        world.held, {"phase": phase, "step": 1, "for_s": 0.0, "error": "OutOfMemoryError: all of it"}
    )


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def count(address: str, outcome: str) -> int:
    lines = [line for line in metrics(address).splitlines() if line.startswith("rollq_on_change_calls_total{")]
    return int(float(next(line.split()[-1] for line in lines if f'outcome="{outcome}"' in line)))


def test_two_processes_call_once_with_the_facts(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    world = World(buffer).start(math={})
    end(world, "stopped")
    file = settings(buffer, server_url, tmp_path, "sh", "-c", "cat >> calls.jsonl")
    with serving(file, name="metrics") as one, serving(file, name="metrics") as other:
        wait_until(lambda: buffer.client.exists(buffer.keys.reported_state) == 1)
        end(world, "failed")
        wait_until(lambda: count(one, "succeeded") + count(other, "succeeded") == 1)
        end(world, "finished")
        wait_until(lambda: count(one, "succeeded") + count(other, "succeeded") == 2)
    first, second = (json.loads(line) for line in (tmp_path / "calls.jsonl").read_text("utf-8").splitlines())
    assert (first["run"], first["before"], first["state"]) == (buffer.run, "stopped", "trainer gone")
    assert "OutOfMemoryError: all of it" in first["sentence"]
    assert "fix the cause first" in first["remedies"][0]
    assert (second["before"], second["state"], second["remedies"]) == ("trainer gone", "finished", [])


def test_while_a_command_hangs_scrapes_are_answered_and_a_signal_ends_both(
    buffer: Buffer, server_url: str, tmp_path: Path
) -> None:
    world = World(buffer).start(math={})
    end(world, "stopped")
    file = settings(buffer, server_url, tmp_path, "sh", "-c", "echo $$ > pid; sleep 100000")
    with serving(file, name="metrics") as address:
        wait_until(lambda: buffer.client.exists(buffer.keys.reported_state) == 1)
        end(world, "failed")
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        assert f'rollq_state{{run="{buffer.run}",state="trainer gone"}} 1.0' in metrics(address)
        assert (count(address, "succeeded"), count(address, "failed")) == (0, 0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_program_that_is_missing_and_a_text_are_refused(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    file = settings(buffer, server_url, tmp_path, "no-such-program")
    done = CliRunner().invoke(main, ["metrics", file, "--port", "0"])
    assert done.exit_code == 2
    assert "monitor.on_change: 'no-such-program' is not a program on the PATH" in done.output
    Path(file).write_text(Path(file).read_text().replace('["no-such-program"]', '"notify-send --urgent"'))
    done = CliRunner().invoke(main, ["metrics", file, "--port", "0"])
    assert done.exit_code == 2
    assert "monitor.on_change = 'notify-send --urgent': give a list: the program, and then each of its" in done.output

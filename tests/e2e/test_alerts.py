"""Each alert of compose/alerts.yaml, fired by a Prometheus that watches a run of real processes, broken on purpose."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.broken_run import BrokenRun
from support.dashboard import serving
from support.prometheus import Prometheus, watching
from support.tiny_qwen3 import tiny_qwen3

pytestmark = pytest.mark.slow

NOW_AND_THEN = """\
import random

def judge(prompt, sample):
    if random.random() < 0.08:
        raise TimeoutError("the service of the judge does not answer")
    return random.random()
"""
HANGS_S = 86_400.0
TRAINER = '[trainer]\nmodel = "model"\noutput = "out"\nsteps = 1_000_000\nmax_mismatch = 1000.0\ndevice = "cpu"\n'


@pytest.fixture
def broken(fresh_server: EmbeddedServer, run_name: str, tmp_path: Path) -> Iterator[BrokenRun]:
    with ExitStack() as roles:
        yield BrokenRun(tmp_path, fresh_server, run_name, roles)


@pytest.fixture
def watched(broken: BrokenRun, prometheus: Path, tmp_path: Path) -> Iterator[Callable[[], Prometheus]]:
    """Starts `rollq metrics` and Prometheus."""
    with ExitStack() as stack:

        def start() -> Prometheus:
            address = stack.enter_context(serving(str(broken.folder / "rollq.toml"), name="metrics"))
            return stack.enter_context(watching(prometheus, tmp_path, address))

        yield start


Watched = Callable[[], Prometheus]


def fill_memory(server: EmbeddedServer, share: float) -> None:
    """Limit the server's memory so that this share of it is used, most of it by ballast."""
    with redis.Redis.from_url(server.url) as client:
        client.setrange("ballast", 50_000_000, b"x")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / share))


def test_a_server_that_is_down(broken: BrokenRun, watched: Watched, fresh_server: EmbeddedServer) -> None:
    broken.start("produce")
    broken.until("starting")
    watcher = watched()
    fresh_server.stop()
    watcher.until_firing("RollqUnreadable")


def test_a_trainer_that_is_killed_and_comes_back(broken: BrokenRun, watched: Watched) -> None:
    broken.start("produce", "work")
    trainer = broken.train()
    watcher = watched()
    broken.until("training: ")
    trainer.kill()
    trainer.join()
    assert "the trainer has failed or is silent" in watcher.until_firing("RollqTrainerGone")["annotations"]["summary"]


def test_a_judge_that_always_raises(broken: BrokenRun, watched: Watched) -> None:
    broken.write(judge="broken_judge.judge")
    broken.start("produce", "work")
    broken.train()
    watched().until_firing("RollqFailing")


def test_a_judge_that_raises_now_and_then(broken: BrokenRun, watched: Watched) -> None:
    (broken.folder / "broken_judge.py").write_text(NOW_AND_THEN)
    broken.write(judge="broken_judge.judge")
    broken.start("produce", "work")
    broken.train()
    assert watched().until_firing("RollqJudgeErrors")["labels"]["severity"] == "warning"


def test_memory_that_fills_and_is_full(broken: BrokenRun, watched: Watched, fresh_server: EmbeddedServer) -> None:
    broken.start("produce", "work")
    broken.train()
    watcher = watched()
    broken.until("training: ")
    fill_memory(fresh_server, 0.75)
    assert watcher.until_firing("RollqMemory")["labels"]["severity"] == "warning"
    fill_memory(fresh_server, 0.98)
    watcher.until_firing("RollqMemoryFull")


def test_a_trainer_without_workers(broken: BrokenRun, watched: Watched) -> None:
    broken.start("produce")
    broken.train()
    watched().until_firing("RollqStarving")


def test_a_trainer_that_hangs_in_a_step(broken: BrokenRun, watched: Watched) -> None:
    broken.start("produce", "work")
    broken.train(step_s=HANGS_S)
    assert watched().until_firing("RollqStalenessAtBound")["labels"]["task"] == "math"


def test_long_answers_that_later_ones_overtake(broken: BrokenRun, watched: Watched) -> None:
    task, engine = (
        'max_staleness = 1\nstaleness.stragglers = "expire"\n',
        "lengths = [3, 3, 2000], tokens_per_s = 500.0",
    )
    broken.write(task=task, engine=engine)
    broken.start("produce", "work")
    broken.train()
    watched().until_firing("RollqGroupsExpire")


def test_an_engine_whose_logprobs_are_of_another_model(broken: BrokenRun, watched: Watched) -> None:
    model = tiny_qwen3()
    model.resize_token_embeddings(512)  # for the engine's bytes
    model.save_pretrained(broken.folder / "model")
    broken.write(tables=TRAINER)
    broken.start("produce", "work", "train")
    watched().until_firing("RollqMismatch")

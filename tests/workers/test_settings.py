"""Settings that only a worker's start can check: errors are one sentence that names them, without a traceback."""

import asyncio
import re
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.run import load_engine
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower
from support.worker_run import Script, ScriptedEngine


def test_an_engine_of_ones_own_that_does_not_take_its_options_is_refused() -> None:
    settings = WorkerSettings(engine="rollq.workers.tokenizers.byte.ByteTokenizer", options={"speed": 3})
    with pytest.raises(ConfigError, match=r"^\[worker.options\] of engine 'rollq.*': .* takes no arguments"):
        load_engine(settings)


def test_a_class_that_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'\[worker\]: engine = "rollq.*": ByteTokenizer has no start, generate'):
        load_engine(WorkerSettings(engine="rollq.workers.tokenizers.byte.ByteTokenizer"))


def test_a_weights_folder_that_is_a_file_is_refused(buffer: Buffer, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("not a folder")

    async def scenario() -> None:
        host, calls = EngineHost(lambda: ScriptedEngine(Script()), 0), BufferCalls(buffer)
        with WeightFollower(calls, host, Signals(), WorkerSettings(weights_folder=file), worker="w"):
            pass

    with pytest.raises(ConfigError, match=rf"^\[worker\] weights_folder: no folder can be made in '{file}': .*exists"):
        asyncio.run(scenario())


def test_an_option_that_an_engine_does_not_know_is_refused_with_those_that_it_knows() -> None:
    settings = WorkerSettings(engine="simulated", options={"tokens_pr_s": 1, "max_sequences": "x", "seed": 1})
    message = (
        "'simulated': max_sequences = 'x': must be a whole number; tokens_pr_s: unknown key; did you mean "
        "'tokens_per_s'?; seed: no longer a setting: the lengths are taken in the same random order in each run"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_engine(settings)

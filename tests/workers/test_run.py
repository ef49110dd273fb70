"""A worker as a whole."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.run import Worker
from support.chat_families import BUILT_IN, family_tokenizer
from support.worker_run import Script, WorkerWorld


def test_a_worker_that_is_asked_to_stop_while_its_engine_starts_does_not_wait_for_it(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.sleeps == ["starting"])
        os.kill(os.getpid(), signal.SIGTERM)

    script = world.play(scene, engine="support.worker_run.LoadingEngine")
    assert script.sleeps == ["starting", "start ended"]
    assert buffer.workers() == {}


def test_the_prompts_of_a_task_are_rendered_with_its_options(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, BUILT_IN["Qwen3"])
    options = {"enable_thinking": False}
    world = WorkerWorld(buffer, server_url, {"template_options": options})
    messages = ({"role": "user", "content": "6*7?"},)
    clock = buffer.clock("math")
    buffer.admit("math", [(Prompt(messages, answer="42"), 1)], epoch=clock.epoch, cursor=0, target=9, step=clock.step)
    world.tickets(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: bool(script.requests))

    script = world.play(scene, tokenizer=tmp_path)
    plain: Any = tokenizer.backend
    expected = plain.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert script.requests[0].prompt_ids.tolist() == expected
    with pytest.raises(ConfigError, match=r"^tasks\.math: rows\.template_options\.colour: .* never reads this name"):
        WorkerWorld(buffer, server_url, {"template_options": {"colour": "red"}}).play(scene, tokenizer=tmp_path)

"""A runner's environments and their episodes."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.clients import EvalClient, EvalClientConfig, ModelContext
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.task import Task
from verifiers.v1.types import SamplingConfig

from rollq.environments.verifiers.runner.outcomes import Outcome, failure, kind_of, outcome_of
from rollq.environments.verifiers.runner.rows import TASK, Tasks
from rollq.environments.verifiers.runner.spec import Opened, SpecError, opened

NO_KEY = "ROLLQ_NO_KEY"
"""A variable that does not exist, since the URL identifies a session."""
SHARE = 0.9
"""The share of a session's time that the agent may use; the rest is for rewards."""


class SessionClient(EvalClient):
    """Relays calls to one session, over connections that all sessions share."""

    def __init__(self, config: BaseClientConfig, http: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.client = config.base_url, "-", http
        self.headers: dict[str, str] = {}


class Serving:
    """An environment whose shared tools and relay are up."""

    def __init__(self, made: Opened) -> None:
        self._made = made
        self._tasks = Tasks(made.env.taskset)
        self._reading = asyncio.Lock()

    @classmethod
    async def start(cls, spec: Mapping[str, Any], stack: AsyncExitStack) -> "Serving":
        """Open the environment of `spec` until `stack` is closed. Raises `SpecError`."""
        made = await asyncio.to_thread(opened, spec)
        await stack.enter_async_context(made.env.serving())
        http = build_async_httpx(EvalClientConfig(api_key_var=NO_KEY))
        stack.push_async_callback(http.aclose)
        relay: Any = made.env._interception  # keeps a client with sockets per endpoint, and a session is an endpoint
        relay._client = lambda config: SessionClient(config, http)
        return cls(made)

    async def play(self, session: Mapping[str, Any]) -> Outcome:
        """Play a session's episode."""
        begun_s = time.monotonic()
        digest = (session["metadata"].get("env") or {}).get(TASK, "")
        async with self._reading:
            task = await asyncio.to_thread(self._tasks.find, digest)
        if task is None:
            return failure("environment", "the task set has no task like this row: export the rows again")
        left_s = SHARE * session["deadline_s"] - (time.monotonic() - begun_s)
        client = EvalClientConfig(base_url=session["openai_base_url"], api_key_var=NO_KEY)
        ctx = ModelContext(model="rollq", client=client, sampling=SamplingConfig())
        episode = await self._made.env.run_episode(limited(task, left_s), ctx)
        return outcome_of(episode, self._made.seat)


def limited(task: Task, most_s: float) -> Task:
    """The task with this time limit, or with its own limit if that is shorter."""
    given: float | None = task.data.timeout.agent
    limit_s = most_s if given is None else min(given, most_s)
    return task.with_data(timeout=task.data.timeout.model_copy(update={"agent": limit_s}))


class Environments:
    """The environments that sessions ask for, each started once."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._started: dict[str, asyncio.Task[Serving]] = {}

    async def play(self, session: Mapping[str, Any]) -> Outcome:
        """Play a session's episode, in the environment that the session names."""
        spec = session.get("environment")
        if not isinstance(spec, dict):
            return failure(
                "program", 'this session does not belong to verifiers: give --tasks with env = "verifiers:..."'
            )
        key = json.dumps(spec, sort_keys=True)
        if key not in self._started:
            self._started[key] = asyncio.create_task(Serving.start(spec, self._stack))
        try:
            serving = await asyncio.shield(self._started[key])
        except SpecError as error:
            return failure("environment", str(error))
        except Exception as error:  # noqa: BLE001 - a task set may raise anything
            self._started.pop(key, None)
            kind = kind_of(type(error).__name__, str(error))
            return failure("environment" if kind == "program" else kind, f"{type(error).__name__}: {error}")
        return await serving.play(session)

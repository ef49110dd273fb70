"""An OpenEnv server with the real package, run by the Python that has it: `openenv_server.py PORT KIND [PLACES]`.

`guess`: guess a number between 0 and 9, with a list of tasks. `plain`: the same without a list. `shop`: MCP tools.
"""

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import http_server, interfaces, mcp_environment, mcp_types, types


class GuessAction(types.Action):  # type: ignore[misc]
    """A guess."""

    guess: int


class GuessObservation(types.Observation):  # type: ignore[misc]
    """A hint."""

    hint: str


class Guess(interfaces.Environment[GuessAction, GuessObservation, types.State]):  # type: ignore[misc]
    """Guess a number; each wrong guess costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, index: int = 0, **_: Any
    ) -> GuessObservation:
        self.number = random.Random(f"{seed}/{index}").randrange(10)
        return GuessObservation(hint=f"task {index}: guess a number from 0 to 9 ({seed})")

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        if action.guess == self.number:
            return GuessObservation(hint="right", done=True, reward=1.0)
        if action.guess > 9:
            raise RuntimeError("the environment broke")
        return GuessObservation(hint="higher" if action.guess < self.number else "lower", reward=-0.25)

    @property
    def state(self) -> types.State:
        raise RuntimeError("nobody asks for the state")


class Listed(Guess):
    """With a list of tasks."""

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 40, "test": 4}[split]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [{"name": f"{split} {index}"} for index in range(self.num_tasks(split))[start:stop]]


class Shop(mcp_environment.MCPEnvironment):  # type: ignore[misc]
    """Apples may be bought by a tool; two of them are wanted."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.bought = 0

        @server.tool  # type: ignore[untyped-decorator]
        def buy(item: str, count: int = 1) -> str:
            """Buy something."""
            if item != "apples":
                raise ValueError(f"there are no {item}")
            self.bought += count
            return f"you have {self.bought} {item}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> types.Observation:
        self.bought = 0
        return types.Observation(metadata={"wanted": "two apples"})

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        observation = await super().step_async(action, timeout_s)
        if isinstance(action, mcp_types.CallToolAction):
            observation.done = self.bought >= 2
            observation.reward = 1.0 if self.bought == 2 else 0.0
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> types.Observation:
        raise RuntimeError("only tools")

    @property
    def state(self) -> types.State:
        return types.State()


def main(port: str, kind: str, places: str = "64") -> None:
    """Serve until the process is killed."""
    environment, action, observation = {
        "guess": (Listed, GuessAction, GuessObservation),
        "plain": (Guess, GuessAction, GuessObservation),
        "shop": (Shop, mcp_types.CallToolAction, mcp_types.CallToolObservation),
    }[kind]
    app = http_server.create_app(environment, action, observation, env_name=kind, max_concurrent_envs=int(places))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws_ping_interval=2, ws_ping_timeout=2)


if __name__ == "__main__":
    main(*sys.argv[1:])

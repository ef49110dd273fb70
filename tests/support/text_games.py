"""Small environments for tests, with the interfaces of several packages. Their processes import nothing else."""

import os
import random
import subprocess
import time
from typing import Any


class Guess:
    """Guess a number from 0 to 9, by Gymnasium's interface; uses the global generator, prints, and is cut off after
    four guesses. Some texts break it."""

    def __init__(self, most: int = 9, slow_s: float = 0.0) -> None:
        self.most, self.slow_s = most, slow_s

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        print("noise on the standard output")
        time.sleep(self.slow_s)
        self.number, self.guesses = random.randrange(self.most + 1), 0
        return f"Game {random.randrange(1000)}: guess a number from 0 to {self.most}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "die":
            os._exit(3)
        if action == "hang":
            time.sleep(10_000)
        if action == "leave":
            raise SystemExit("I leave")
        if action == "nan":
            return "", float("nan"), True, False, {}
        if action == "start":
            return str(subprocess.Popen(["sleep", "10000"]).pid), 0.0, False, False, {}
        if action == "process":
            return f"{os.getpid()}", 0.0, False, False, {}
        self.guesses += 1
        right = int(action) == self.number
        return "right" if right else "wrong", float(right), right, self.guesses == 4, {}

    def close(self) -> None:
        self.number = -1


class Shared(Guess):
    """May have several episodes in one process."""

    isolated = True


class Secret:
    """Does not open as its seed says."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"opened at {time.perf_counter_ns()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


class Discrete:
    """A space of actions as Gymnasium's."""

    def contains(self, action: int) -> bool:
        return 0 <= action < 3

    def __str__(self) -> str:
        return "Discrete(3)"


class Grid:
    """Actions are numbers, observations are not texts."""

    action_space = Discrete()

    def reset(self, seed: int | None = None) -> tuple[dict[str, int], dict[str, Any]]:
        self.place = 0
        return {"place": self.place}, {}

    def step(self, action: int) -> tuple[dict[str, int], float, bool, bool, dict[str, Any]]:
        self.place += action
        return {"place": self.place}, 0.5, self.place > 3, False, {}


class Words:
    """By SkyRL-gym's interface."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        done = action == self.answer
        hint = [] if done else [{"role": "user", "content": "no"}]
        return {"observations": hint, "reward": float(done), "done": done, "metadata": {}}


class NoGame:
    """Not an environment."""

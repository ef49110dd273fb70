"""Several packages' environments behind one interface: text in, messages and rewards out.

Their methods identify them, since no such package is imported: Gymnasium and GEM have `reset` and `step`, SkyRL-gym has
`init` and `step`, and TextArena has `reset`, `get_observation` and `step`. Imports only the standard library.
"""

import json
from typing import Any, Protocol

from rollq.buffer.common.mappings import without

Message = dict[str, Any]


class Adapter(Protocol):
    """One episode."""

    def reset(self, seed: int) -> list[Message]:
        """Start the episode, and return the opening messages."""

    def step(self, text: str) -> Message:
        """Answer the model's text. Returns `messages`, `reward`, `done`, `truncated` and `invalid`."""

    def close(self) -> None:
        """Release the environment's resources."""


class NotAnEnvironment(Exception):
    """The object does not have the methods of an environment."""


def _has(made: Any, method: str) -> bool:
    return callable(getattr(made, method, None))


def adapt(make: Any, options: Message) -> Adapter:
    """A new environment from a class or function, called with `options`. Raises `NotAnEnvironment`.

    SkyRL's environments are made without the option `prompt`, which goes to their `init`.
    """
    if _has(make, "init") or (not isinstance(make, type) and "prompt" in options):
        return SkyRl(make(**without(options, {"prompt"})), options)
    environment = make(**options)
    if _has(environment, "get_observation"):
        return TextArena(environment)
    if _has(environment, "reset") and _has(environment, "step"):
        return Gymnasium(environment)
    raise NotAnEnvironment(f"{type(environment).__name__} has neither reset and step nor init and step")


class Gymnasium:
    """An environment with Gymnasium's `reset` and `step`, such as GEM's. Actions are strings, or integers in a discrete
    action space."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        space = getattr(environment, "action_space", None)
        self._space = space if type(space).__name__ == "Discrete" else None

    def reset(self, seed: int) -> list[Message]:
        """See `Adapter.reset`."""
        opened = self._environment.reset(seed=seed)
        return said(opened[0] if isinstance(opened, tuple) else opened)

    def step(self, text: str) -> Message:
        """See `Adapter.step`."""
        action: Any = text
        if self._space is not None:
            try:
                action = int(text)
            except ValueError:
                return invalid("write a whole number")
            if not self._space.contains(action):
                return invalid(f"{action} is not in {self._space}")
        observation, reward, terminated, truncated, *_ = self._environment.step(action)
        return outcome(observation, reward, terminated, truncated)

    def close(self) -> None:
        """See `Adapter.close`."""
        close(self._environment)


class SkyRl:
    """An environment of SkyRL-gym."""

    def __init__(self, environment: Any, options: Message) -> None:
        self._environment = environment
        self._prompt = options.get("prompt", [])

    def reset(self, seed: int) -> list[Message]:
        """See `Adapter.reset`. The global generators have been seeded."""
        prompt, *_ = self._environment.init(self._prompt)
        return said(prompt)

    def step(self, text: str) -> Message:
        """See `Adapter.step`."""
        made = self._environment.step(text)
        return outcome(made["observations"], made["reward"], made["done"])

    def close(self) -> None:
        """See `Adapter.close`."""
        close(self._environment)


class TextArena:
    """A game of TextArena for one player, with the game's action wrappers. Messages come from the game itself, since a
    conversation already has the earlier messages."""

    def __init__(self, game: Any) -> None:
        self._game = game
        while hasattr(game, "env"):
            game = game.env
        self._inner = game

    def reset(self, seed: int) -> list[Message]:
        """See `Adapter.reset`."""
        self._game.reset(num_players=1, seed=seed)
        return said(self._observed())

    def step(self, text: str) -> Message:
        """See `Adapter.step`."""
        done, _ = self._game.step(action=text)
        if not done:
            return outcome(self._observed(), None, terminated=False)
        rewards, info = self._inner.close()
        player = self._inner.state.current_player_id
        why = info.get(player, {}).get("reason") if isinstance(info, dict) else None
        return outcome(why or "", None if rewards is None else rewards[player], terminated=True)

    def close(self) -> None:
        """Do nothing: games hold no resources."""

    def _observed(self) -> str:
        player, messages = self._inner.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(str(text) for sender, text, *_ in messages if sender != player)


def outcome(observation: Any, reward: Any, terminated: Any, truncated: Any = False) -> Message:
    """A step's fields. `float`, which may raise, converts a reward that is not a number."""
    return {
        "messages": said(observation) if observation not in ("", [], None) else [],
        "reward": None if reward is None else float(reward),
        "done": bool(terminated) or bool(truncated),
        "truncated": bool(truncated),
        "invalid": 0,
    }


def invalid(problem: str) -> Message:
    """A step's fields for a text that is not an action."""
    return {**outcome(f"error: {problem}", None, terminated=False), "invalid": 1}


def said(observation: Any) -> list[Message]:
    """An observation as messages: it may be a string, messages, or any JSON value or array."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(isinstance(each, dict) and "role" in each for each in observation):
        return [{"role": each["role"], "content": str(each["content"])} for each in observation]
    return [{"role": "user", "content": json.dumps(observation, default=plain)}]


def plain(value: Any) -> Any:
    """A numpy value as a JSON value."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def close(environment: Any) -> None:
    """Close an environment that can be closed."""
    if callable(getattr(environment, "close", None)):
        environment.close()

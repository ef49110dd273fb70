"""The rewards that tests write: a number in `reward.txt`, or numbers by name in `reward.json`."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.workers.judging.rewards import SCORE
from rollq.workers.user_code.real_numbers import finite

TEXT: Final = "reward.txt"
NAMES: Final = "reward.json"
REWARD: Final = "reward"
"""The reward's name in `reward.json`. If this name is present, the other entries are facts."""
MOST_BYTES: Final = 65_536

Rewards = Mapping[str, float]
"""Numbers that add up to the reward, or the reward `score` with facts."""


def read_rewards(folder: Path) -> Rewards:
    """The rewards in `folder`; links are not followed. Raises `ValueError`."""
    if (text := _content(folder, TEXT)) is not None:
        return {SCORE: _number(text)}
    if (names := _content(folder, NAMES)) is not None:
        return _named(names)
    raise ValueError(f"the tests wrote neither {TEXT} nor {NAMES}")


def _number(text: bytes) -> float:
    try:
        return finite(float(text.decode()))
    except ValueError as error:
        raise ValueError(f"the tests wrote {text[:80]!r} to {TEXT}, not a finite number") from error


def _named(text: bytes) -> Rewards:
    try:
        given: Any = exact_json.loads(text)
        if not isinstance(given, dict) or not given:
            raise ValueError("not an object")
        rewards = {str(name): finite(value) for name, value in given.items()}
    except ValueError as error:
        raise ValueError(f"the tests wrote {text[:80]!r} to {NAMES}, not finite numbers by name") from error
    if REWARD in rewards:
        return {SCORE: rewards.pop(REWARD), **rewards}
    return rewards


def _content(folder: Path, name: str) -> bytes | None:
    """The content of a file; None without a file. Raises `ValueError` for anything but a small file."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        finally:
            os.close(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{name} is not a file")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES} bytes")
    return content


def total(rewards: Rewards) -> float:
    """The reward."""
    return rewards[SCORE] if SCORE in rewards else sum(rewards.values())

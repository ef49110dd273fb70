"""Episodes in child processes as environments for rollq's loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.environments.episodes import SEED, check_opening, place_of
from rollq.environments.text.processes import Child, ChildFailed, Children, Place, children_of
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Opening, Step

ARGUMENTS: Final = "options"
"""The key, in a row's episode, of further arguments for the class."""


class TextEpisode:
    """One episode of an environment, in a process."""

    def __init__(self, path: str, python: str = "", options: Mapping[str, Any] | None = None) -> None:
        self._place = Place(path, python)
        self._options = options or {}
        self._children: Children | None = None
        self._held: tuple[Child, int] | None = None

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Open the row's episode. The opening is already in the row's prompt."""
        place = place_of(prompt)
        try:
            opened = await self.open(place)
        except ChildFailed as error:
            raise self._failed(error) from error
        check_opening(place, opening_text(opened))
        return Opening()

    async def step(self, text: str) -> Step:
        """Give the environment the model's text."""
        assert self._held is not None
        child, number = self._held
        try:
            answered = await child.ask("step", episode=number, text=text)
        except ChildFailed as error:
            raise self._failed(error) from error
        return Step(**{**answered, "messages": tuple(answered["messages"])})

    async def teardown(self) -> None:
        """Close the episode. Its process becomes free, or is killed if it did not answer."""
        held, self._held = self._held, None
        if held is not None:
            assert self._children is not None
            await self._children.close(*held)

    async def open(self, place: Mapping[str, Any]) -> list[Message]:
        """Open an episode, and return its opening messages. Raises `ChildFailed`."""
        self._children = children_of(self._place)
        options = {**self._options, **place.get(ARGUMENTS, {})}
        child, number, opened = await self._children.open(options, place[SEED])
        self._held = child, number
        return list(opened)

    def _failed(self, error: ChildFailed) -> SampleFailed:
        return SampleFailed(FailureKind.ENVIRONMENT, f"{self._place.path}: {error}")


def opening_text(messages: Sequence[Message]) -> str:
    """The opening in the form for rows: a single user message's text, or the messages as JSON."""
    if is_text(messages):
        text: str = messages[0]["content"]
        return text
    return exact_json.dumps(list(messages)).decode()


def is_text(messages: Sequence[Message]) -> bool:
    """Whether an opening is a single user text."""
    return len(messages) == 1 and messages[0]["role"] == "user"

"""Chat formats by their names in the settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from rollq.buffer.errors import ConfigError
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.harmony import HarmonyFormat
from rollq.workers.agents.tool_calls import CALL, END_OF_THOUGHTS, parse_calls
from rollq.workers.agents.turns import ChatFormat, Turn
from rollq.workers.agents.vllm_parsers import HERMES, VllmFormat
from rollq.workers.engines.protocol import Tokenizer

START_OF_THOUGHTS: Final = re.compile(r"\A\s*<think>")


class PlainFormat:
    """Text without calls; all of it is content."""

    verbatim: ClassVar[bool] = True

    def check(self, tokenizer: Tokenizer) -> None:
        """Accept every tokenizer."""

    async def parse(self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message]) -> Turn:
        """See `ChatFormat.parse`."""
        return Turn(text, text)


class HermesFormat:
    """Calls as Hermes and Qwen write them, after thoughts that end with `</think>`, if there are any."""

    verbatim: ClassVar[bool] = True

    def check(self, tokenizer: Tokenizer) -> None:
        """Accept every tokenizer."""

    async def parse(self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message]) -> Turn:
        """See `ChatFormat.parse`."""
        thoughts, end, visible = text.rpartition(END_OF_THOUGHTS)
        reasoning = START_OF_THOUGHTS.sub("", thoughts) if end else None
        return Turn(text, CALL.sub("", visible), reasoning, tuple(parse_calls(text)))


BUILT_IN: Final[Mapping[str, Callable[[], ChatFormat]]] = {
    "": PlainFormat,
    HERMES: HermesFormat,
    "harmony": HarmonyFormat,
}


def make_format(tool_parser: str, reasoning_parser: str = "") -> ChatFormat:
    """The chat format of these parsers, by name: built-in ones, and vLLM's where it is installed; "" for none.

    Raises `ConfigError` for an unknown name, and for a parser of vLLM where it is not installed.
    """
    if tool_parser == "harmony" and reasoning_parser:
        raise ConfigError("agent_options.tool_parser 'harmony' parses thoughts too: leave out reasoning_parser")
    if not reasoning_parser and tool_parser in BUILT_IN:
        return BUILT_IN[tool_parser]()
    return VllmFormat.load(tool_parser, reasoning_parser)

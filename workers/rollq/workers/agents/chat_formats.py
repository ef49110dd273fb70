"""Chat formats, by the names that the settings use: built-in formats, and vLLM's if vLLM is installed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rollq.buffer.errors import ConfigError
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.deepseek import CALLS_START, parse_deepseek
from rollq.workers.agents.formats.families import family_of
from rollq.workers.agents.formats.glm import parse_glm
from rollq.workers.agents.formats.harmony import BODY, CHANNEL, START, parse_harmony, parse_harmony_thoughts
from rollq.workers.agents.formats.hermes import parse_hermes
from rollq.workers.agents.formats.llama3 import parse_llama3
from rollq.workers.agents.formats.mistral import CALLS, parse_mistral, parse_mistral_thoughts
from rollq.workers.agents.formats.qwen3_xml import parse_qwen3_xml
from rollq.workers.agents.formats.thoughts import parse_thoughts
from rollq.workers.agents.turns import ChatFormat, Turn
from rollq.workers.agents.vllm_parsers import HERMES, VllmFormat
from rollq.workers.engines.protocol import Tokenizer

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class BuiltInFormat:
    """A built-in format. `parser`, and `thoughts` for models without tools, are pure functions. The tokenizer must have
    all `tokens`."""

    name: str
    parser: Callable[[str, Sequence[Message], str], Turn]
    thoughts: Callable[[str, str], Turn]
    tokens: tuple[str, ...] = ()
    verbatim: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        """See `ChatFormat.check`."""
        for token in self.tokens:
            if len(tokenizer.encode(token)) != 1:
                raise ConfigError(f"agent_options.tool_parser {self.name!r} needs a tokenizer with the token {token!r}")

    async def parse(
        self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message] | None, prompt: str
    ) -> Turn:
        """See `ChatFormat.parse`."""
        if tools is not None and not tools:
            return self.thoughts(text, prompt)
        return self.parser(text, tools or (), prompt)


class AutoFormat:
    """The format of the chat template's model family."""

    verbatim: ClassVar[bool] = False

    def check(self, tokenizer: Tokenizer) -> None:
        """See `ChatFormat.check`."""
        format_of(tokenizer).check(tokenizer)

    async def parse(
        self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message] | None, prompt: str
    ) -> Turn:
        """See `ChatFormat.parse`."""
        return await format_of(tokenizer).parse(tokenizer, text, ids, tools, prompt)


def parse_plain(text: str, *_: object) -> Turn:
    """The turn of a text without calls: all of the text is content."""
    return Turn(text, text)


BUILT_IN: Final[Mapping[str, BuiltInFormat]] = {
    named.name: named
    for named in (
        BuiltInFormat(HERMES, parse_hermes, parse_thoughts, verbatim=True),
        BuiltInFormat("qwen3_coder", parse_qwen3_xml, parse_thoughts),
        BuiltInFormat("qwen3_xml", parse_qwen3_xml, parse_thoughts),
        BuiltInFormat("llama3_json", parse_llama3, parse_plain),
        BuiltInFormat("mistral", parse_mistral, parse_mistral_thoughts, (CALLS,)),
        BuiltInFormat("deepseek_v3", parse_deepseek, parse_thoughts, (CALLS_START,)),
        BuiltInFormat("deepseek_v31", parse_deepseek, parse_thoughts, (CALLS_START,)),
        BuiltInFormat("glm45", parse_glm, parse_thoughts),
        BuiltInFormat("glm47", parse_glm, parse_thoughts),
        BuiltInFormat("harmony", parse_harmony, parse_harmony_thoughts, (START, CHANNEL, BODY)),
        BuiltInFormat("openai", parse_harmony, parse_harmony_thoughts, (START, CHANNEL, BODY)),
    )
}
"""The built-in formats by their names in vLLM's server, and `harmony`, which the server calls `openai`."""
PLAIN: Final = BuiltInFormat("", parse_plain, parse_plain, verbatim=True)
NAMES: Final = ", ".join(BUILT_IN)


def make_format(tool_parser: str, reasoning_parser: str = "") -> ChatFormat:
    """The chat format of the parsers with these names: built-in parsers, or vLLM's if vLLM is installed. "" means no
    parser.

    Raises `ConfigError` for an unknown name, and for a vLLM parser if vLLM is not installed.
    """
    if reasoning_parser and tool_parser in {AUTO, *BUILT_IN} - {HERMES}:
        raise ConfigError(f"agent_options.tool_parser {tool_parser!r} parses thoughts too: leave out reasoning_parser")
    if tool_parser == AUTO:
        return AutoFormat()
    if not reasoning_parser and (not tool_parser or tool_parser in BUILT_IN):
        return BUILT_IN.get(tool_parser, PLAIN)
    return VllmFormat.load(tool_parser, reasoning_parser, instead=f"use auto or one of {NAMES}")


def format_of(tokenizer: Tokenizer) -> BuiltInFormat:
    """The format of the tokenizer's chat template. Raises `ConfigError` if there is no template or its family is
    unknown."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "agent_options.tool_parser 'auto' needs a chat template, and the tokenizer has none: add the model's "
            f"chat_template.jinja to its folder, or name one of {NAMES}"
        )
    family = family_of(tokenizer.chat_template)
    if family is None:
        raise ConfigError(
            "agent_options.tool_parser 'auto' does not know the chat template of this model: name one of "
            f"{NAMES}, or one of vLLM's if vLLM is installed"
        )
    return BUILT_IN[family]

"""vLLM's parsers for tool calls and thoughts, called in the worker without a server.

Parsers run in threads with a time limit, since a model may write any text. If a parser raises, the call counts as
malformed, and the model is informed. Tool calls within closed thoughts are not parsed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Self

from rollq.buffer.errors import ConfigError
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.hermes import hermes_calls
from rollq.workers.agents.tool_calls import Malformed, ToolCall, call_id, parse_arguments
from rollq.workers.agents.turns import Turn
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.user_code.calls import UserFunction

PARSE_TIMEOUT_S: Final = 10.0
"""Longest time for parsing one turn, in seconds."""
HERMES: Final = "hermes"
NOISY: Final = ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")
"""Loggers that print a traceback for every malformed call."""
UNBOUNDED: Final = {"dots": "takes hours for a call followed by a few thousand spaces"}
"""Parsers that a model's text could keep busy indefinitely, each with the reason."""
TOOL: Final[Message] = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
"""A tool for trying a parser."""
MARKS: Final = ("tool", "<|python_tag|>")
"""Parts of the tokens that models write around calls."""


@dataclass(frozen=True, slots=True)
class VllmFormat:
    """The format of vLLM's tool parser and reasoning parser with these names; "" means no parser.

    The tool parser `hermes` is rollq's. `both`, `tools_alone` and `thoughts_alone` hold vLLM's classes, composed as in
    vLLM's server. `run` calls them in a thread.
    """

    tool_parser: str
    reasoning_parser: str
    both: Any
    tools_alone: Any
    thoughts_alone: Any
    run: UserFunction
    verbatim: ClassVar[bool] = False

    @classmethod
    def load(cls, tool_parser: str, reasoning_parser: str, *, instead: str) -> Self:
        """Import the parsers. Raises `ConfigError` if vLLM is not installed or does not know a name. The message
        includes `instead`, which lists the other tool parsers."""
        for logger in NOISY:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        theirs = "" if tool_parser == HERMES else tool_parser
        tools_alone = _load("tool_parser", theirs, instead)
        thoughts_alone = _load("reasoning_parser", reasoning_parser, "leave it out")
        both = _compose(theirs, reasoning_parser) if theirs and reasoning_parser else thoughts_alone or tools_alone
        run = UserFunction.wrap(_parse, PARSE_TIMEOUT_S, quick=False)
        return cls(tool_parser, reasoning_parser, both, tools_alone, thoughts_alone, run)

    def check(self, tokenizer: Tokenizer) -> None:
        """See `ChatFormat.check`."""
        named = [
            ("tool_parser", self.tool_parser, self.tools_alone),
            ("reasoning_parser", self.reasoning_parser, self.both),
        ]
        for setting, name, parser in named:
            if name and parser is not None:
                try:
                    _call(parser, _backend(tokenizer), "-", [], (TOOL,))
                except Exception as error:
                    raise ConfigError(
                        f"agent_options.{setting} {name!r} cannot be used with this tokenizer: "
                        f"{str(error) or type(error).__name__}"
                    ) from error

    async def parse(
        self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message] | None, prompt: str
    ) -> Turn:
        """See `ChatFormat.parse`."""
        try:
            turn: Turn = await self.run(self, _backend(tokenizer), text, ids, tools)
        except Exception as error:  # noqa: BLE001 - the model reads why its turn cannot be parsed
            return Turn(text, text, calls=(Malformed(f"the message cannot be parsed: {error!r:.200}"),))
        return turn


def known_parsers(setting: str) -> list[str]:
    """The names of vLLM's parsers for `tool_parser` or `reasoning_parser`. Raises `ImportError` without vLLM."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    manager: Any = ToolParserManager if setting == "tool_parser" else ReasoningParserManager
    names: list[str] = manager.list_registered()
    return names


def _load(setting: str, name: str, instead: str) -> Any:
    """One parser's class; None for "". Raises `ConfigError`, which names the setting."""
    if not name:
        return None
    try:
        names = known_parsers(setting)
    except ImportError as error:
        raise ConfigError(
            f"agent_options.{setting} {name!r} needs vLLM, which is not installed here: {instead}, or "
            "pip install 'rollq[vllm]'"
        ) from error
    if name not in names:
        raise ConfigError(
            f"agent_options.{setting} {name!r} does not exist: {instead}, or one of vLLM's: {', '.join(names)}"
        )
    if name in UNBOUNDED:
        raise ConfigError(f"agent_options.{setting} {name!r} is refused: vLLM's parser {UNBOUNDED[name]}")
    try:
        return _compose(**{setting: name})
    except Exception as error:
        raise ConfigError(
            f"agent_options.{setting} {name!r}: vLLM cannot load it: {error.__cause__ or error}"
        ) from error


def _compose(tool_parser: str = "", reasoning_parser: str = "") -> Any:
    from vllm.parser.parser_manager import ParserManager

    return ParserManager.get_parser(tool_parser or None, reasoning_parser or None, enable_auto_tools=True)


def _backend(tokenizer: Tokenizer) -> Any:
    """vLLM's view of the Hugging Face tokenizer."""
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        raise ConfigError("it is not a Hugging Face tokenizer")
    return _cached(backend)


@lru_cache(maxsize=8)
def _cached(backend: Any) -> Any:
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(backend)


def _call(parser: Any, backend: Any, text: str, ids: list[int], tools: Sequence[Message]) -> tuple[Any, Any, Any]:
    """The thoughts, content and calls that vLLM's parser finds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools] or None)
    parsed: tuple[Any, Any, Any] = parser(backend, request.tools).parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return parsed


def _parser(format: VllmFormat, calls_none: bool, *, has_thoughts: bool) -> Any:
    """The parser for the text after the thoughts, or for all text without thoughts; None if nothing is left to
    parse."""
    if has_thoughts:
        return None if calls_none else format.tools_alone
    return format.thoughts_alone if calls_none else format.both


def _parsed_calls(calls: Sequence[Any], text: str) -> list[ToolCall | Malformed]:
    """The calls that vLLM found in `text`; a call whose id is not in `text` gets an id that depends only on the
    text."""
    return [
        parse_arguments(call.name, call.arguments or "{}", call.id if _is_in(call.id, text) else call_id(text, index))
        for index, call in enumerate(calls)
    ]


def _parse(format: VllmFormat, backend: Any, text: str, ids: list[int], tools: Sequence[Message] | None) -> Turn:
    """The turn that the parsers of `format` find; runs in a thread."""
    calls_none = tools is not None and not tools
    thoughts, visible = _closed_thoughts(format, backend, text)
    parser = _parser(format, calls_none, has_thoughts=thoughts is not None)
    content, tool_calls = visible, None
    if parser is not None:
        reasoning, parsed, tool_calls = _call(parser, backend, visible, ids, tools or ())
        content = parsed or ""
        if reasoning:
            thoughts, visible = reasoning, content
    if calls_none:
        return Turn(text, content, thoughts or None)
    if format.tool_parser == HERMES:
        content, own = hermes_calls(visible, visible)
        return Turn(text, content, thoughts or None, own)
    calls = _parsed_calls(tool_calls or (), text)
    if format.tool_parser and (problem := _problem(_marks(backend), visible, has_calls=bool(calls))):
        calls[-1:] = [Malformed(problem)]
    return Turn(text, content, thoughts or None, tuple(calls))


def _is_in(id: str | None, text: str) -> bool:
    """Whether the model wrote a call's id. Otherwise vLLM invented it."""
    return bool(id) and str(id) in text


def _closed_thoughts(format: VllmFormat, backend: Any, text: str) -> tuple[str | None, str]:
    """The thoughts, and the text after them. The thoughts are None if the token that ends them is missing."""
    if not format.reasoning_parser:
        return None, text
    reasoning = format.both(backend).reasoning_parser
    end = reasoning.reasoning_end_str
    if not end or end not in text:
        return None, text
    thoughts, _, rest = text.partition(end)
    start = reasoning.reasoning_start_str
    return thoughts.partition(start)[2] if start and start in thoughts else thoughts, rest


def _problem(marks: Sequence[str], text: str, *, has_calls: bool) -> str | None:
    """The problem with a text's last call; None if there is none. `has_calls` is true if calls were found in the text.
    Parsers skip text that they cannot read, and some complete a call that was cut off."""
    there = [mark for mark in marks if mark in text]
    for mark in there:
        if (end := _end_of(mark, marks)) and text.count(mark) > text.count(end):
            return f"a tool call without {end}"
    return f"the tool call after {there[0]!r} cannot be parsed" if there and not has_calls else None


def _end_of(mark: str, marks: Sequence[str]) -> str | None:
    """The end mark that belongs to a call's start mark, if any."""
    end = mark.replace("<", "</", 1) if "</" not in mark else mark
    end = end if end in marks else mark.replace("begin", "end").replace("start", "end")
    return end if end != mark and end in marks else None


def _marks(backend: Any) -> list[str]:
    """The tokens around calls."""
    return [token for token in backend.get_added_vocab() if any(mark in token.lower() for mark in MARKS)]

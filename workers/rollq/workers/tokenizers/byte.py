"""A tokenizer for engines without one: a text's ids are its UTF-8 bytes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

EOS_ID = 1
"""The simulated engine's end-of-sequence token."""


class ByteTokenizer:
    """`Tokenizer` whose ids are bytes; it needs no files."""

    eos_ids = frozenset({EOS_ID})
    eos_id = EOS_ID
    chat_template = None
    template_options: Mapping[str, Any] = MappingProxyType({})

    def encode_prompt(self, text: str) -> list[int]:
        """Same as `encode`: prompts have no special tokens."""
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes below 32, such as line breaks, are left out unless `special`."""
        return bytes(token for token in ids if (0 if special else 32) <= token < 256).decode(errors="ignore")

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The tools and the messages, one per line."""
        lines = [f"tool: {tool['function']['name']}\n" for tool in tools]
        return "".join([*lines, *(f"{message['role']}: {message.get('content', '')}\n" for message in messages)])

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The bytes of what `render` returns."""
        return self.encode(self.render(messages, tools))

    def chat_continued(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The bytes of what `render` returns, without the last newline."""
        return self.chat(messages, tools)[:-1]

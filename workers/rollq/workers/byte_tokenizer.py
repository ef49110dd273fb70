"""A tokenizer for engines that have none: text is its UTF-8 bytes."""

from typing import Any

EOS_ID = 1
"""The simulated engine's end of sequence."""


class ByteTokenizer:
    """`Tokenizer` whose ids are bytes; it needs no files."""

    eos_ids = frozenset({EOS_ID})

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; what is no printable byte is left out."""
        return bytes(token for token in ids if 32 <= token < 256).decode(errors="ignore")

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The messages one under the other."""
        return self.encode("".join(f"{message['role']}: {message.get('content', '')}\n" for message in messages))

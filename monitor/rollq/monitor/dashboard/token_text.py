"""The text of single tokens. Pure."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""

CONTEXT = 8
"""How many tokens before a range are decoded with the range: a character may consist of several tokens."""


def pieces(decode: Decode, ids: Sequence[int], start: int, end: int) -> list[str]:
    """The text that each of `ids[start:end]` adds; "" for a token that only begins a character. The last token of a
    character gets the character's text."""
    first = max(0, start - CONTEXT)
    texts, begin, shown = list[str](), first, first
    for at in range(first, min(end, len(ids))):
        before, now = decode(ids[begin:shown]), decode(ids[begin : at + 1])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            texts.append(now[len(before) :])
            begin, shown = shown, at + 1
        else:
            texts.append("")
    return texts[start - first :]

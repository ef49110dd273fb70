"""Extracts a bare answer from a model's text, since reasoning-gym's graders accept no surrounding text. Pure."""

from rollq.environments.tags import last_tagged
from rollq.workers.judging.numbers import decimal_text, last_number, only_number


def extracted(text: str, answer: str) -> str:
    """The last `<answer>` of a text. Without a tag, its last number if the row's `answer` is a plain number, otherwise
    as many of its last lines as that answer has.

    `1e5` and `0110` are not plain numbers: they may be digits of another base.
    """
    if (tagged := last_tagged(text)) is not None:
        return tagged
    own = only_number(answer)
    if own is not None and decimal_text(own) == answer.strip():
        number = last_number(text)
        return "" if number is None else decimal_text(number)
    lines = text.strip().splitlines()
    return "\n".join(lines[-max(1, len(answer.strip().splitlines())) :]).strip()

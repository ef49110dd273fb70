"""Checks of texts in settings, whose errors say in words what is wrong. Pure."""

import re

from pydantic import AfterValidator


def matching(pattern: str, words: str) -> AfterValidator:
    """A validator of texts that must match a pattern as a whole; `words` are its error, such as "must be a URL"."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(words)
        return text

    return AfterValidator(check)


HTTP_URL = matching(r"https?://\S+", "must be a URL that begins with http:// or https://")

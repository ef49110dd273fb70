"""The answer that a model writes between tags. Pure."""

import re
from typing import Final

_TAG: Final = re.compile(r"<(/?)answer>", re.IGNORECASE)


def last_tagged(text: str) -> str | None:
    """The last text within `<answer>` and `</answer>`, without surrounding whitespace; None if there is none.

    Takes time linear in the text, even if it repeats one tag many times.
    """
    found = None
    start = -1
    for tag in _TAG.finditer(text):
        if tag[1]:
            found = (start, tag.start()) if start >= 0 else found
            start = -1
        elif start < 0:
            start = tag.end()
    return None if found is None else text[slice(*found)].strip()

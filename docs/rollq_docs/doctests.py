"""An extension of griffe: examples in docstrings, which start with `>>>`, are shown as code."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^(>>> .*(?:\n.+)*)", re.MULTILINE)


class Doctests(Extension):
    """Puts each example in a block of code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that has been loaded."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)

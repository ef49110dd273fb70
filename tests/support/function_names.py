"""The names of all functions that rollq loads into the server."""

from pathlib import Path

import rollq.buffer
from rollq.buffer.store import library

FUNCTION_NAMES = frozenset(
    path.stem for kind in library.KINDS for path in (Path(rollq.buffer.__file__).parent / "lua" / kind).glob("*.lua")
)

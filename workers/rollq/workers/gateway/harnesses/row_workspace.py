"""The folder that a row names for its samples, which must be inside the folder of all workspaces."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollq.buffer.values.failures import FailureKind, SampleFailed


def row_workspace(folders: Path, field: str, metadata: Mapping[str, Any]) -> Path:
    """The folder below `folders` that the `field` of a row's metadata names. Raises `SampleFailed`."""
    name = metadata.get(field)
    if not isinstance(name, str) or not name or "\0" in name:
        raise SampleFailed(
            FailureKind.PROMPT, f"the row's {field!r} (workspace_field) is {name!r:.80}, not the name of a folder"
        )
    root = folders.resolve()
    found = (root / name).resolve()
    if root not in found.parents:
        raise SampleFailed(FailureKind.PROMPT, f"the row's {field!r} (workspace_field), {name!r:.80}, leaves {root}")
    if not found.is_dir():
        raise SampleFailed(FailureKind.PROMPT, f"the row's {field!r} (workspace_field): {found} is not a folder")
    return found

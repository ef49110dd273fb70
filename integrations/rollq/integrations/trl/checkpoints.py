"""Marks each of TRL's complete checkpoints by a file with its lineage, written last.

TRL writes a checkpoint file by file, each rank separately, so a folder without this file may be incomplete.
"""

from pathlib import Path
from typing import NamedTuple

import orjson

from rollq.buffer.common.atomic_files import atomic_file, fsync_tree

MARK = "rollq.json"


class TrlCheckpoint(NamedTuple):
    """`folder` holds the weights after train step `step`; `lineage` is the training `Consumer`'s."""

    step: int
    folder: Path
    lineage: str


def folder_of(output: Path, step: int) -> Path:
    """TRL's folder for the checkpoint of a step."""
    return output / f"checkpoint-{step}"


def begin(folder: Path) -> None:
    """Mark the folder as incomplete. Call this before writing files into it."""
    (folder / MARK).unlink(missing_ok=True)


def finish(folder: Path, step: int, lineage: str) -> None:
    """Mark the folder as complete. Call this when all ranks have written their files."""
    fsync_tree(folder)
    atomic_file(folder / MARK, orjson.dumps({"step": step, "lineage": lineage}))


def newest_checkpoint(output: Path) -> TrlCheckpoint | None:
    """The complete checkpoint with the highest step in TRL's `output_dir`; None if there is none."""
    marks = [(orjson.loads(mark.read_bytes()), mark.parent) for mark in output.glob(f"checkpoint-*/{MARK}")]
    checkpoints = [TrlCheckpoint(state["step"], folder, state["lineage"]) for state, folder in marks]
    # without renamed copies
    ours = [checkpoint for checkpoint in checkpoints if checkpoint.folder == folder_of(output, checkpoint.step)]
    return max(ours, default=None)

"""Files and folders that appear complete and on disk or not at all, even if the process dies.

Until then they have a hidden name next to the final name. A killed process leaves the hidden folder behind; the next
`atomic_folder` with the same name reuses it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file with mode 0644, replacing an existing one; its folder is created if missing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            os.fchmod(number, 0o644)  # mkstemp's 0600 would hide it from roles that run as other users
            file.flush()
            os.fsync(number)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


@contextmanager
def atomic_folder(
    folder: Path, *, hidden: Path | None = None, replace: bool = True, durable: bool = True
) -> Iterator[Path]:
    """Yield an empty folder, which becomes `folder` when the block ends without an error and is removed otherwise.

    `hidden` is the folder to yield, for callers that lock it or need exclusive use. A `folder` that exists at the
    block's end is replaced, or kept with `replace=False`. `durable=False` does not wait for the disk: a power cut may
    then leave an incomplete folder. Raises `OSError`.
    """
    hidden = hidden or folder.with_name(f".{folder.name}.unfinished")
    hidden.mkdir(parents=True, exist_ok=True)
    try:
        _empty(hidden)
        yield hidden
        if durable:
            fsync_tree(hidden)
        if not folder.exists() or replace:
            _put_in_place(hidden, folder)  # from now on, the hidden name is free for another process
        else:
            shutil.rmtree(hidden)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename `unfinished` to `folder` once it is all on disk; an existing `folder` is replaced. Raises `OSError`."""
    fsync_tree(unfinished)
    _put_in_place(unfinished, folder)


def former_folder(folder: Path) -> Path:
    """The name of an existing `folder` while `atomic_folder` replaces it."""
    return folder.with_name(f".{folder.name}.former")


def fsync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it are on disk."""
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def fsync_path(path: Path) -> None:
    """Wait until a file is on disk, or for a folder, until the names in it are, but not their files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _put_in_place(hidden: Path, folder: Path) -> None:
    """Rename `hidden`. An existing folder is set aside first, so that a complete folder exists at every instant."""
    former = former_folder(folder)
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        folder.rename(former)
    try:
        hidden.rename(folder)
    except OSError:
        if former.exists():
            former.rename(folder)
        raise
    fsync_path(folder.parent)
    shutil.rmtree(former, ignore_errors=True)

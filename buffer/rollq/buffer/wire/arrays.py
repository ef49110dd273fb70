"""Large named arrays outside Redis: each is a file in a folder that workers and trainer share, named by an `ArrayRef`.

Invariant: an array is loaded only if its bytes have the checksum that Redis holds. A file is named by its content and
appears whole or not at all, so storing the same array again changes nothing. rollq never deletes these files; they
belong to the folder's owner. Storing an array again updates its file's time, so it is safe to delete files that are
older than the oldest group that can still be trained or replayed.
"""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from rollq.buffer.common.atomic_files import atomic_file
from rollq.buffer.errors import ArrayError
from rollq.buffer.values.rollouts import ArrayRef

ARRAY = "array"
"""Name of the only tensor in each file."""


def store_array(folder: Path, array: npt.NDArray[Any]) -> ArrayRef:
    """Write `array`, of any shape and a safetensors dtype, to `folder`; return its reference for a segment.

    Raises `ArrayError` if the array cannot be written.
    """
    try:
        data = safetensors.numpy.save({ARRAY: np.ascontiguousarray(array).reshape(array.shape)})
    except (SafetensorError, KeyError) as error:
        raise ArrayError(f"an array of {array.dtype} cannot be stored: safetensors has no such dtype") from error
    digest = hashlib.sha256(data).hexdigest()
    path = folder.absolute() / f"{digest}.safetensors"
    try:
        if path.exists():
            os.utime(path)
        else:
            atomic_file(path, data)
    except OSError as error:
        raise ArrayError(f"array {str(path)!r} cannot be written: {error.strerror}") from error
    return ArrayRef(path.as_uri(), digest, tuple(array.shape), array.dtype.name)


def load_array(array: npt.NDArray[Any] | ArrayRef) -> npt.NDArray[Any]:
    """Load a referenced array and compare its checksum, dtype and shape; an array is returned unchanged.

    Raises `ArrayError` if the file is missing or does not hold the stored array.
    """
    if not isinstance(array, ArrayRef):
        return array
    parts = urlsplit(array.uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ArrayError(f"array {array.uri!r}: only file:///path can be loaded")
    try:
        data = Path(unquote(parts.path)).read_bytes()
    except OSError as error:
        raise ArrayError(
            f"array {array.uri!r} cannot be read: {error.strerror}; its folder must be shared with every role that "
            "loads it, and its files kept for as long as groups that name them may be trained"
        ) from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != array.sha256:
        raise ArrayError(f"array {array.uri!r}: sha256 is {sha256[:12]}..., but {array.sha256[:12]}... was stored")
    try:
        loaded: npt.NDArray[Any] = safetensors.numpy.load(data)[ARRAY]
    except (SafetensorError, KeyError) as error:
        raise ArrayError(f"array {array.uri!r}: not a safetensors file with a tensor {ARRAY!r}: {error}") from error
    if loaded.shape != array.shape or loaded.dtype.name != array.dtype:
        raise ArrayError(
            f"array {array.uri!r} is {loaded.dtype} {list(loaded.shape)}; its reference says {array.dtype} "
            f"{list(array.shape)}"
        )
    return loaded

"""Arrays beside Redis: stored whole under their content's name, checked when they are loaded."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import safetensors.numpy

from rollq.buffer.errors import ArrayError, InvalidGroup
from rollq.buffer.values.rollouts import ArrayRef, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire.arrays import load_array, store_array
from rollq.buffer.wire.frame_decoding import decode_sample
from rollq.buffer.wire.frame_encoding import encode_samples


def file_of(reference: ArrayRef) -> Path:
    return Path(unquote(reference.uri.removeprefix("file://")))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_xd02_a_stored_array_comes_back_with_dtype_and_shape(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    reference = store_array(tmp_path, array)
    loaded = load_array(reference)
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape) == (np.dtype(reference.dtype), reference.shape)
    np.testing.assert_array_equal(loaded, array)


def test_xd02_an_array_that_is_not_contiguous_keeps_its_values(tmp_path: Path) -> None:
    board = np.arange(24).reshape(4, 6)
    np.testing.assert_array_equal(load_array(store_array(tmp_path, board.T)), board.T)


def test_xd02_the_same_array_is_one_file_and_storing_it_again_makes_its_time_new(tmp_path: Path) -> None:
    folder = tmp_path / "not made yet"
    first = store_array(folder, np.arange(3))
    os.utime(file_of(first), (1, 1))
    assert store_array(folder, np.arange(3)) == first
    assert store_array(folder, np.arange(4)) != first
    assert sorted(path.suffix for path in folder.iterdir()) == [".safetensors"] * 2
    assert file_of(first).stat().st_mtime > 1


def test_xd02_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArrayError, match="No space left on device"):
        store_array(tmp_path, np.arange(3))
    assert list(tmp_path.iterdir()) == []


def test_xd02_an_array_that_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArrayError, match="no such dtype"):
        store_array(tmp_path, np.array(["text"]))
    assert list(tmp_path.iterdir()) == []


def test_xd02_a_missing_changed_or_other_file_is_named(tmp_path: Path) -> None:
    reference = store_array(tmp_path, np.arange(6.0))
    for wrong, message in (
        (replace(reference, uri="https://host/array"), "only file:///path"),
        (replace(reference, uri="file://host/array"), "only file:///path"),
        (replace(reference, uri=f"{reference.uri}x"), "No such file.*must be shared"),
        (replace(reference, sha256="0" * 64), "sha256 is"),
        (replace(reference, shape=(3, 2)), r"is float64 \[6\]; its reference says float64 \[3, 2\]"),
        (replace(reference, dtype="int64"), "its reference says int64"),
    ):
        with pytest.raises(ArrayError, match=message):
            load_array(wrong)
    file_of(reference).write_bytes(file_of(reference).read_bytes()[:-1])
    with pytest.raises(ArrayError, match="sha256 is"):
        load_array(reference)


@pytest.mark.parametrize("content", [b"", b"no safetensors", safetensors.numpy.save({"other": np.zeros(2)})])
def test_xd02_a_file_of_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "array"
    path.write_bytes(content)
    reference = ArrayRef(path.as_uri(), hashlib.sha256(content).hexdigest(), (2,), "float64")
    with pytest.raises(ArrayError, match="not a safetensors file with a tensor 'array'"):
        load_array(reference)


def test_xd02_a_frame_carries_the_reference_and_not_the_array(tmp_path: Path) -> None:
    large = np.random.default_rng(0).random(100_000)
    segment = Segment(
        np.array([1], np.int32),
        np.array([2], np.int32),
        np.array([-0.5], np.float32),
        (VersionSpan(1, 0, 1),),
        arrays={"large": store_array(tmp_path, large), "small": np.arange(3)},
    )
    frame = encode_samples([Sample((segment,), SampleStatus.COMPLETED, reward=1.0)])
    assert len(frame) < 2000
    [decoded] = decode_sample(frame).segments
    assert decoded.arrays.keys() == {"large", "small"}
    assert decoded.arrays["large"] == segment.arrays["large"]
    np.testing.assert_array_equal(load_array(decoded.arrays["large"]), large)
    np.testing.assert_array_equal(load_array(decoded.arrays["small"]), np.arange(3))


def test_xd02_a_reference_of_other_types_cannot_be_made() -> None:
    with pytest.raises(InvalidGroup, match="shape is a tuple of ints"):
        ArrayRef("file:///x", "0", (2.0,), "float64")  # type: ignore[arg-type]
    with pytest.raises(InvalidGroup, match="are texts"):
        ArrayRef(Path("/x"), "0", (2,), "float64")  # type: ignore[arg-type]

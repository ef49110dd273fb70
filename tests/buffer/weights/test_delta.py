"""Deltas lead from one version to the next, bit by bit, or are refused."""

import hashlib
import io
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from faults.fuzz_deltas import hostile_delta, refuse_delta, versions
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights import delta as module
from rollq.buffer.weights.chain import MAX_DELTAS, Chain, Link, is_chain
from rollq.buffer.weights.delta import apply_delta, can_encode, encode_delta

BASE, RESULT = "b" * 64, "a" * 64


def encoded(base: bytes, result: bytes) -> bytes:
    file = io.BytesIO()
    encode_delta([base], [result], (BASE, RESULT), file)
    return file.getvalue()


def applied(folder: Path, base: bytes, delta: bytes) -> bytes:
    (folder / "weights").write_bytes(base)
    (folder / "delta").write_bytes(delta)
    apply_delta([folder / "weights"], folder / "delta", BASE, RESULT)
    return (folder / "weights").read_bytes()


@pytest.mark.parametrize("part_bytes", [8, 24, 1 << 20])
@pytest.mark.parametrize("seed", range(5))
def test_a_delta_gives_every_bit_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, seed: int
) -> None:
    """Whatever the values are, and however the tensors are cut."""
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    rng = np.random.default_rng(seed)
    layout = {
        "f64": (np.float64, (3, 2)),
        "f16": (np.float16, (13,)),
        "i8": (np.int8, (5, 5)),
        "none": (np.int32, (0,)),
    }

    def tensors() -> bytes:
        return save(
            {
                name: np.frombuffer(rng.bytes(np.dtype(dtype).itemsize * int(np.prod(shape))), dtype).reshape(shape)
                for name, (dtype, shape) in layout.items()
            }
        )

    base, result = tensors(), tensors()
    assert can_encode([base], [result])
    assert applied(tmp_path, base, encoded(base, result)) == result


def test_weights_that_did_not_change_cost_an_index(tmp_path: Path) -> None:
    base = save({"w": np.ones(100_000, np.float32)})
    delta = encoded(base, base)
    assert len(delta) < 400
    assert applied(tmp_path, base, delta) == base


def test_a_delta_of_one_tensor_leaves_the_others_alone(tmp_path: Path) -> None:
    base = {"a": np.ones(1000, np.float32), "b": np.zeros(1000, np.float32)}
    result = save({**base, "b": np.full(1000, 2, np.float32)})
    delta = encoded(save(base), result)
    assert b'"a"' not in delta
    assert applied(tmp_path, save(base), delta) == result


@pytest.mark.parametrize(
    "other",
    [{"w": np.ones(4, np.float16)}, {"v": np.ones(4, np.float32)}, {"w": np.ones((2, 2), np.float32)}, {}],
    ids=["dtype", "name", "shape", "none"],
)
def test_other_tensors_have_no_delta(other: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    base = save({"w": np.ones(4, np.float32)})
    assert not can_encode([base], [save(other)])
    assert not can_encode([base, base], [base, save(other)])
    assert not can_encode([base], [base, base])


@pytest.mark.long
def test_ten_thousand_hostile_deltas_give_the_result_or_nothing(tmp_path: Path) -> None:
    """A worker refuses them already for their SHA-256; here nothing compares it."""
    rng, errors = random.Random(1), []
    for _ in range(10_000):
        try:
            refuse_delta(hostile_delta(rng), tmp_path)
        except WeightsError as error:
            errors.append(str(error))
    assert len(errors) > 9_900, "the others gave the very bytes of the result"
    assert not [error for error in errors if "\n" in error]


def test_a_sound_delta_is_not_refused(tmp_path: Path) -> None:
    for base, result in zip(versions(), versions()[1:], strict=False):
        (tmp_path / "weights").write_bytes(base.data)
        (tmp_path / "delta").write_bytes(result.delta)
        apply_delta([tmp_path / "weights"], tmp_path / "delta", base.digest, result.digest)
        assert (tmp_path / "weights").read_bytes() == result.data


def test_a_delta_spans_the_files_of_a_model_and_only_in_their_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    names = ["a", "b"]
    base = [save({name: rng.standard_normal(500)}) for name in names]
    result = [save({name: rng.standard_normal(500)}) for name in names]
    file = io.BytesIO()
    encode_delta(base, result, (BASE, RESULT), file)
    paths, delta = [tmp_path / name for name in names], tmp_path / "delta"
    delta.write_bytes(file.getvalue())

    def fill() -> None:
        for path, data in zip(paths, base, strict=True):
            path.write_bytes(data)

    fill()
    apply_delta(paths, delta, BASE, RESULT)
    assert [path.read_bytes() for path in paths] == result
    for wrong in (paths[::-1], paths[:1], [*paths, paths[0]]):
        fill()
        with pytest.raises(WeightsError, match="other names, dtypes or shapes"):
            apply_delta(wrong, delta, BASE, RESULT)


def link(base: str, result: str) -> Link:
    return Link(uri=f"file:///{result[:4]}.delta", bytes=10, sha256="0" * 64, base=base, result=result)


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_a_chain_comes_back_as_it_was() -> None:
    chain = Chain(complete="file:///complete", digest=digest(0)).extended(link(digest(0), digest(1)))
    assert Chain.decode(chain.encode()) == chain
    assert is_chain(chain.uri)
    assert chain.versions == [digest(0), digest(1)]
    assert chain.uris == {"file:///complete", f"file:///{digest(1)[:4]}.delta"}


def test_a_chain_with_a_gap_or_out_of_order_or_too_long_is_refused() -> None:
    links = [link(digest(at), digest(at + 1)) for at in range(MAX_DELTAS + 1)]
    for wrong in (links[1:3], [links[1], links[0]], [links[0], links[0]], links):
        raw = Chain.model_construct(complete="file:///x", digest=digest(0), deltas=wrong).model_dump_json().encode()
        with pytest.raises(WeightsError, match="chain of deltas of weights cannot be read"):
            Chain.decode(raw)
    for raw in (b"", b"{}", b"[]"):
        with pytest.raises(WeightsError, match="chain of deltas"):
            Chain.decode(raw)

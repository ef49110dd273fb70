"""The compiled codec sends and reads what the Python code would, and rollq installs without a compiler too."""

import importlib.util
import random
import subprocess
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conftest import missing
from faults.fuzz_codec import any_frame, any_group, check_same_arguments, check_same_samples, frame_with
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire import compiled
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples

ROOT = Path(__file__).parents[3]


def plain_samples(prompt_tokens: int = 4, tokens: int = 6) -> tuple[Sample, ...]:
    """Two samples of one prompt."""
    prompt = np.arange(prompt_tokens, dtype=np.int32)
    segment = Segment(
        prompt, np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32), (VersionSpan(1, 2, tokens),)
    )
    return tuple(Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, reward) for reward in (0.0, 1.0))


def samples_of_prompts(prompts: Iterable[npt.NDArray[np.int32]], per_sample: int = 1) -> tuple[Sample, ...]:
    """Samples with a segment for each prompt, and other weights for each."""
    segments = [
        Segment(prompt, np.arange(2, dtype=np.int32), np.zeros(2, np.float32), (VersionSpan(0, version, 2),))
        for version, prompt in enumerate(prompts)
    ]
    of_samples = [tuple(segments[at : at + per_sample]) for at in range(0, len(segments), per_sample)]
    return tuple(Sample(of_sample, SampleStatus.COMPLETED, reward=1.0) for of_sample in of_samples)


def prompts_with_one_hash() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Two prompts that differ, for which the compiled module has the same hash."""

    def mix(hashes: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mixed: npt.NDArray[np.uint64] = (hashes ^ ids ^ hashes >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15)
        return mixed

    ids = np.arange(200_000, dtype=np.uint64)
    hashes = mix(mix(np.full_like(ids, 12), ids), ids)  # 12 bytes, in three ids: the last makes up for the difference
    order = np.argsort(hashes)
    different = hashes[order][1:] ^ hashes[order][:-1]
    first = int(np.flatnonzero(different < np.uint64(1 << 31))[0])
    one, other = int(order[first]), int(order[first + 1])
    return np.array([one, one, 0], np.int32), np.array([other, other, different[first]], np.int32)


@pytest.fixture(autouse=True)
def codec() -> None:
    if compiled.passes is None:
        missing("the codec was not compiled (Debian: apt-get install gcc python3-dev, then make install)")


def test_a_plain_group_takes_the_compiled_way() -> None:
    assert compiled.scan(plain_samples()) is not None


def test_any_group_is_sent_as_the_python_code_sends_it() -> None:
    rng = random.Random(1)
    for _ in range(1_000):
        check_same_arguments(any_group(rng))


@pytest.mark.parametrize("tokens", [1, 4_095, 4_096, 20_000], ids=["one", "joined", "apart", "long"])
def test_long_arrays_are_sent_as_the_python_code_sends_them(tokens: int) -> None:
    check_same_arguments(tuple(plain_samples(tokens, tokens)))


def test_many_prompts_and_weights_are_sent_as_the_python_code_sends_them() -> None:
    prompts = [np.array([1, 2, turn % 50], np.int32) for turn in range(320)]
    samples = samples_of_prompts(prompts, per_sample=40)
    assert compiled.scan(samples) is not None
    check_same_arguments(samples)


def test_prompts_that_differ_and_have_one_hash_are_left_to_the_python_code() -> None:
    one, other = prompts_with_one_hash()
    for prompts, is_plain in (((one, one.copy()), True), ((one, other[:2]), True), ((one, other), False)):
        samples = samples_of_prompts(prompts)
        assert (compiled.scan(samples) is not None) == is_plain
        check_same_arguments(samples)


def test_a_list_which_may_change_while_it_is_read_is_left_to_the_python_code() -> None:
    assert compiled.scan(list(plain_samples())) is None


def test_a_module_of_another_source_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "_plain.c"
    assert compiled.load(source) is compiled.passes, "an installation without its source is whole"
    source.write_bytes(compiled.SOURCE.read_bytes())
    assert compiled.load(source) is compiled.passes
    assert not caplog.records
    source.write_bytes(compiled.SOURCE.read_bytes() + b"/* a later version */")
    assert compiled.load(source) is None
    assert "install rollq again" in caplog.text


def test_any_frame_is_read_as_the_python_code_reads_it() -> None:
    rng, refused = random.Random(1), 0
    for _ in range(1_000):
        try:
            check_same_samples(any_frame(rng))
        except CorruptFrame:
            refused += 1
    assert 0 < refused < 1_000


@pytest.mark.parametrize("part", ["segments", "references", "prompts", "samples"])
def test_a_frame_with_an_odd_layout_is_read_as_the_python_code_reads_it(part: str) -> None:
    frames = [encode_samples(plain_samples()), encode_samples(())]
    values: tuple[Any, ...] = (None, True, 0, 1.5, "", "abcde", [], {}, {"0": {}}, [[]], [0, 0, 1, False, []])
    for frame, odd in product(frames, values):
        with suppress(CorruptFrame):
            check_same_samples(frame_with(frame, part, odd))


def test_arrays_of_a_frame_are_views_of_it() -> None:
    (segment,) = decode_samples(encode_samples(plain_samples()))[0].segments
    for array in (segment.prompt_ids, segment.response_ids, segment.logprobs):
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_the_compiler_has_no_warning() -> None:
    include = sysconfig.get_paths()["include"]
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-fsyntax-only"]
    subprocess.run(["cc", *strict, f"-I{include}", str(ROOT / "buffer/rollq/buffer/wire/_plain.c")], check=True)


def test_rollq_installs_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    compiled_file = hook.compile_into(tmp_path, ROOT)
    assert compiled_file is not None
    assert compiled_file.name.startswith("_plain.")
    monkeypatch.setenv("CC", "false")
    assert hook.compile_into(tmp_path, ROOT) is None

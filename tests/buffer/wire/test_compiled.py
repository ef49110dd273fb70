"""The compiled codec sends and reads what the Python code would, and rollq installs without a compiler too."""

import importlib.util
import random
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from conftest import missing
from faults.fuzz_codec import any_frame, any_group, check_same_arguments, check_same_samples
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire import compiled
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples

ROOT = Path(__file__).parents[3]


def plain_samples(prompt_tokens: int = 4, tokens: int = 6) -> list[Sample]:
    """Two samples of one prompt."""
    prompt = np.arange(prompt_tokens, dtype=np.int32)
    segment = Segment(
        prompt, np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32), (VersionSpan(1, 2, tokens),)
    )
    return [Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, reward) for reward in (0.0, 1.0)]


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


def test_a_group_that_changes_while_it_is_read_is_left_to_the_python_code() -> None:
    samples = plain_samples()

    class Clearing(str):
        """Equal to "temperature", and clears the list when it is compared with it."""

        def __hash__(self) -> int:
            return hash("temperature")

        def __eq__(self, other: object) -> bool:
            samples.clear()
            return other == "temperature"

    samples[0] = Sample(samples[0].segments, SampleStatus.COMPLETED, reward=1.0, sampling={Clearing(): 0.5})
    assert compiled.scan(samples) is None


def test_any_frame_is_read_as_the_python_code_reads_it() -> None:
    rng, refused = random.Random(1), 0
    for _ in range(1_000):
        try:
            check_same_samples(any_frame(rng))
        except CorruptFrame:
            refused += 1
    assert 0 < refused < 1_000


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

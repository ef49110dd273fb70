"""Some hostile inputs for every decoder and every Redis function. `make fuzz` feeds them a million."""

from pathlib import Path

import pytest

from faults.fuzz_decoders import fuzz, targets
from faults.fuzz_functions import Fuzzer
from rollq.buffer.store.embedded_server import EmbeddedServer

INPUTS = 300


@pytest.mark.parametrize("name", sorted(target.name for target in targets(Path())))
def test_a_decoder_refuses_what_it_cannot_read(name: str, tmp_path: Path) -> None:
    (target,) = [target for target in targets(tmp_path) if target.name == name]
    assert not fuzz(target, seed=1, count=INPUTS * target.share // 40 + 20).findings


def test_a_function_refuses_a_call_before_it_writes_or_leaves_the_store_sound(
    fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    tallies = Fuzzer(fresh_server, seed=1).run(tmp_path, per_call=2)
    assert not [finding for tally in tallies for finding in tally.findings]

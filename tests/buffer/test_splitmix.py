import numpy as np

from rollq.buffer.common.splitmix import GOLDEN_GAMMA, splitmix64


def test_the_stream_of_seed_zero_is_the_published_one() -> None:
    states = np.arange(3, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
    assert [hex(value) for value in splitmix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]

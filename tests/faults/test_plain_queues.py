"""The drill without rollq loses prompts. `python -m faults plain` is the long version, with RQ's worker too."""

from pathlib import Path

from faults.plain_queues import drill


def test_sorted_sets_and_zpopmin_lose_prompts(tmp_path: Path) -> None:
    found = drill("zpopmin", 1, tmp_path, prompts=150)
    assert found.kills > 0
    assert found.trained > 0
    assert found.lost > 0

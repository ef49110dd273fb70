"""The memory of a machine, and of a container on it."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollq.buffer.common.memory import usable_memory

ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def test_this_machine_has_some() -> None:
    assert 0 < usable_memory() <= ALL


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("0::/\n", {"memory.max": f"{5 * MIB}\n"}, 5 * MIB),
        ("0::/\n", {"memory.max": "max\n"}, ALL),
        ("0::/pod/box\n", {"pod/memory.max": f"{6 * MIB}\n", "pod/box/memory.max": "max\n"}, 6 * MIB),
        ("0::/pod/box\n", {"pod/memory.max": f"{6 * MIB}\n", "pod/box/memory.max": f"{4 * MIB}\n"}, 4 * MIB),
        ("2:cpu:/\n4:memory:/docker/1\n0::/\n", {"memory/memory.limit_in_bytes": f"{7 * MIB}\n"}, 7 * MIB),
        ("4:memory:/box\n", {"memory/box/memory.limit_in_bytes": f"{8 * MIB}\n"}, 8 * MIB),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, ALL),
        ("", {}, ALL),
    ],
)
def test_a_container_has_the_least_of_its_limits(
    tmp_path: Path, groups: str, limits: Mapping[str, str], usable: int
) -> None:
    files = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == usable


def test_a_system_without_control_groups_has_all(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == ALL

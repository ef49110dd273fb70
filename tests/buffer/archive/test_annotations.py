"""What a trainer has written about a group is read alone, also from a file of many."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rollq.buffer.archive.annotations import AnnotationReader, root_of
from rollq.buffer.archive.schema import VERSION, VERSION_KEY
from rollq.buffer.errors import ArchiveError


def write(folder: Path, name: str, rows: list[dict[str, object]], version: str = str(VERSION)) -> None:
    path = folder / "sums+annotations" / "1a2b" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows).replace_schema_metadata({VERSION_KEY: version})
    parquet.write_table(table, path, row_group_size=4)


def row(group_id: int, sample: int = 0, **values: object) -> dict[str, object]:
    return {"task": "math", "group_id": group_id, "sample": sample, "segment": 0, "advantage": 0.5, **values}


def test_the_highest_epoch_counts_and_all_files_of_it_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, "step-00000003-1-0-0.parquet", [row(7, mismatch=[9.0])])
    write(tmp_path, "step-00000003-2-0-0.parquet", [row(number, mismatch=[0.1, None]) for number in range(20)])
    write(tmp_path, "step-00000003-2-1-0.parquet", [row(7, 1, mismatch=[0.3])])
    write(tmp_path, "step-00000003-2-0-1.parquet", [row(7, ratio=[1.0, 1.1])])
    found = AnnotationReader(str(tmp_path), "sums", "1a2b").of_group("math", 7, 3)
    assert found.keys() == {(0, 0), (1, 0)}
    assert found[0, 0].values == {"mismatch": [0.1, None], "ratio": [1.0, 1.1]}
    assert found[0, 0].advantage == 0.5


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    reader = AnnotationReader(str(tmp_path), "sums", "1a2b")
    assert reader.of_group("math", 7, 3) == {}
    write(tmp_path, "step-00000004-1-0-0.parquet", [row(7, mismatch=[9.0])])
    assert AnnotationReader(str(tmp_path), "sums", "1a2b").of_group("math", 8, 4) == {}


def test_a_file_of_a_later_rollq_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "step-00000003-1-0-0.parquet", [row(7, mismatch=[9.0])], version="99")
    with pytest.raises(ArchiveError, match="has version 99"):
        AnnotationReader(str(tmp_path), "sums", "1a2b").of_group("math", 7, 3)


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("root", ["/mnt/archive", "s3://bucket/prefix"])
def test_the_archive_is_found_above_each_of_its_folders(root: str, depth: int) -> None:
    parts = ["sums", "1a2b", "math", "step-00000001-000001.parquet"]
    url = "/".join([root, *parts[:depth]])
    assert root_of(url, ["/".join(parts[depth:])], "sums", "1a2b") == root


def test_files_of_an_export_have_nothing_beside_them() -> None:
    with pytest.raises(ArchiveError, match="is not in an archive with a folder for each run"):
        root_of("/tmp/out", ["all.parquet"], "", "")

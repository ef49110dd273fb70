from pathlib import Path

import pytest

from rollq.buffer.common.atomic_files import atomic_file, atomic_folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_file_replaces_one_that_exists_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text in (b"old", b"new"):
        atomic_file(path, text)
        assert contents(tmp_path) == {"new/file": text.decode()}
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_put_in_place_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    with atomic_folder(folder) as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "file").write_text("new")
        assert not folder.exists()
    assert contents(tmp_path) == {"deep/folder/inner/file": "new"}
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_a_folder_that_fails_leaves_the_former_one_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with atomic_folder(folder) as unfinished:
        (unfinished / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_folder(folder) as unfinished:
        (unfinished / "file").write_text(str(1 / 0))
    assert contents(tmp_path) == {"folder/file": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("replace", "text"), [(True, "new"), (False, "old")])
def test_a_folder_that_exists_is_replaced_or_kept_as_asked(tmp_path: Path, replace: bool, text: str) -> None:
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "folder", replace=replace) as unfinished:
            (unfinished / "file").write_text(content)
    assert contents(tmp_path) == {"folder/file": text}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".folder.unfinished"
    (left / "inner").mkdir(parents=True)
    (left / "file").write_text("left")
    with atomic_folder(tmp_path / "folder") as unfinished:
        (unfinished / "other").write_text("new")
    assert contents(tmp_path) == {"folder/other": "new"}

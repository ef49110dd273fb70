"""A copy of a call that arrives late changes nothing, whatever was done since."""

from pathlib import Path

from rollq.buffer.store import library
from support.any_server import AnyServer
from support.buffer_run import payloads_in
from support.function_names import FUNCTION_NAMES
from support.late_copies import AT_ANY_TIME, RecordingBuffer, check_copies

DELETES = "begin_delete"
"""A test of deletion repeats it."""


def test_a_copy_of_any_call_that_arrives_after_any_later_move_changes_nothing(
    any_server: AnyServer, run_name: str, tmp_path: Path
) -> None:
    with RecordingBuffer.connect(any_server.url, run_name, payloads=payloads_in(tmp_path / "payloads")) as recorded:
        copied = check_copies(recorded, tmp_path)
    assert copied == FUNCTION_NAMES - library.READ_ONLY - AT_ANY_TIME - {DELETES}

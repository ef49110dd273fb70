import logging

import pytest

from rollq.buffer.common.log_once import MAX_KEYS, LogOnce

log = logging.getLogger(__name__)


def test_a_failure_is_logged_once_and_another_one_too(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(log)
    for key in ("first", "first", "second", "first"):
        once.warning(key, "failed: %s", key)
    assert caplog.messages == ["failed: first", "failed: second"]
    assert caplog.records[0].funcName == "test_a_failure_is_logged_once_and_another_one_too"


def test_a_traceback_is_logged_when_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("broken")
    LogOnce(log).warning("key", "failed", exc_info=error)
    assert caplog.records[0].exc_info == (ValueError, error, None)


def test_at_most_a_hundred_different_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(log)
    for key in range(MAX_KEYS + 5):
        once.warning(key, "failed: %d", key)
    assert len(caplog.messages) == MAX_KEYS

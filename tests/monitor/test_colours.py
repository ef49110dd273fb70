"""Every status has a distinct colour in the report."""

from rollq.monitor.report.report import COLOURS, WORKING_STATUSES


def test_every_status_has_a_distinct_colour() -> None:
    assert len(set(COLOURS)) == len(COLOURS) >= len(WORKING_STATUSES)

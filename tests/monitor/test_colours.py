"""Every status has a colour of its own in the report."""

from rollq.monitor.report import COLOURS, WORKING_STATUSES


def test_every_status_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS)) == len(COLOURS) >= len(WORKING_STATUSES)

"""Pauses between tries of a request, which tests shorten or lengthen."""

import pytest

from rollq.workers.engines.openai.engine import ServerSettings
from rollq.workers.http.settings import RetrySettings


def set_pauses(monkeypatch: pytest.MonkeyPatch, first_s: float, longest_s: float) -> None:
    """Let the pause before the first retry be `first_s` and no pause longer than `longest_s`, to all servers."""
    monkeypatch.setattr(RetrySettings, "FIRST_PAUSE_S", first_s)
    monkeypatch.setattr(RetrySettings, "LONGEST_PAUSE_S", longest_s)
    monkeypatch.setattr(ServerSettings, "LONGEST_PAUSE_S", longest_s)

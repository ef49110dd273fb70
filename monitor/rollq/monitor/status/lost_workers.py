"""Describes workers that no longer report: where they ran, and the GPUs that they may still hold. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollq.buffer.values.places import Place
from rollq.monitor.status.read import RunStatus
from rollq.monitor.text.units import count, seconds_in_words

MOST_NAMED = 2


def lost_workers(run: RunStatus) -> Iterator[tuple[str, str]]:
    """A sentence with a remedy for each silent or dead worker. If there are many, the rest are counted."""
    lost = {name: report for name, report in run.workers.items() if report["condition"] != "alive"}
    named = sorted(lost, key=lambda name: (lost[name]["age_s"], name))
    for name in named[:MOST_NAMED]:
        yield _sentence(name, lost[name]), _remedy(lost[name])
    if (more := len(named) - MOST_NAMED) > 0:
        yield f"{count(more, 'other worker')} {'has' if more == 1 else 'have'} also gone silent", ""


def _sentence(name: str, report: Mapping[str, Any]) -> str:
    place = Place.read(report)
    where = f" on {place}," if place else ""
    gpus = f", and may still hold {gpus_in_words(place.gpus)}" if place and place.gpus else ""
    return f"{name}{where} has said nothing for {seconds_in_words(report['age_s'])}{gpus}"


def _remedy(report: Mapping[str, Any]) -> str:
    place = Place.read(report)
    if place is None or not place.gpus:
        return ""
    return f"if process {place.pid} still runs on {place.host}, end it, so that its GPU is free: `kill -9 {place.pid}`"


def gpus_in_words(gpus: str) -> str:
    """GPUs, given as in `Place`, in words, for the object of a sentence."""
    return f"GPU {gpus}" if "," not in gpus.partition(" (")[0] else f"GPUs {gpus}"

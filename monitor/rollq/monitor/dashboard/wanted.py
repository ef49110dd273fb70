"""Selects groups for a list of the page by the request's parameters."""

import math
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from rollq.buffer.query.conditions import OneSample
from rollq.buffer.query.language import parse_sample
from rollq.buffer.query.ranking import LIST_SORTS, Sort
from rollq.buffer.query.selection import Selection
from rollq.buffer.values.rollouts import FinishReason, Status
from rollq.monitor.dashboard.answers import number_of


def selection_of(request: Request, tasks: Sequence[str], statuses: Sequence[Status]) -> Selection:
    """The selection of a request, among all `tasks` and `statuses`. Raises `ValueError`, `QueryError`."""
    given = request.query_params
    sort = given.get("sort", "")
    return Selection(
        chosen(given.get("task", ""), tasks, "task"),
        [Status(name) for name in chosen(given.get("status", ""), statuses, "status")],
        number_of(request, "step", None, least=1),
        given.get("prompt", ""),
        given.get("q", ""),
        _sample_of(request),
        Sort.parse(sort, LIST_SORTS) if sort else None,
    )


def _sample_of(request: Request) -> OneSample | None:
    """The conditions on one sample; None if there are none."""
    bounds = {
        "reward": {"$gte": _float_of(request, "min_reward"), "$lte": _float_of(request, "max_reward")},
        "tokens": {"$gte": number_of(request, "min_tokens", None), "$lte": number_of(request, "max_tokens", None)},
    }
    wanted: dict[str, Any] = {
        field: present
        for field, of_field in bounds.items()
        if (present := {name: bound for name, bound in of_field.items() if bound is not None})
    }
    if finish := request.query_params.get("finish", ""):
        wanted["finish_reason"] = {"$in": chosen(finish, list(FinishReason), "finish")}
    return parse_sample(wanted) if wanted else None


def _float_of(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={text[:40]}: must be a number")
    return number


def chosen(values: str, known: Sequence[str], what: str) -> list[str]:
    """The comma-separated `values`, in the order of `known`; all for "". Raises `ValueError` for an unknown value."""
    wanted = list(filter(None, values.split(",")))
    if unknown := [value for value in wanted if value not in known]:
        raise ValueError(f"unknown {what} {unknown[0]!r}: must be one of {', '.join(known)}")
    return [value for value in known if value in wanted] if wanted else list(known)

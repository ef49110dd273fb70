"""The rollout browser as JSON: a live run's or an archive's pages of groups, single groups, and further tokens."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol

from starlette.requests import Request
from starlette.routing import Route

from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.query.conditions import OneSample
from rollq.buffer.query.selection import Page, Selection
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard.answers import Missing, json_endpoint, number_of
from rollq.monitor.dashboard.groups import TokenTexts, group_of, row_of, tokens_of
from rollq.monitor.dashboard.trainer_values import TrainedReader
from rollq.monitor.dashboard.wanted import selection_of
from rollq.monitor.groups.view import view_of


class Rollouts(Protocol):
    """Groups. Any thread may call these methods. They raise `RollqError` if groups cannot be read."""

    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        ...

    def page(self, selection: Selection, *, after: str, limit: int) -> Page:
        """Some groups of a selection."""
        ...

    def look(self, task: str, group_id: int) -> FoundGroup | None:
        """A group with its samples; None if it does not exist."""
        ...


class Browsing:
    """The endpoints of the rollout browser. They run in threads."""

    def __init__(
        self,
        run: str,
        rollouts: Rollouts,
        statuses: Sequence[Status],
        trained: TrainedReader,
        texts: TokenTexts,
        *,
        elsewhere: Sequence[Status] = (),
    ) -> None:
        """`statuses` lists the possible group statuses, in the order of lists. `elsewhere` lists statuses of groups
        that may be only in the archive; counts by status omit these groups."""
        self._run, self._rollouts, self._statuses = run, rollouts, statuses
        self._trained, self._texts, self._elsewhere = trained, texts, elsewhere

    def routes(self) -> list[Route]:
        """The routes of all endpoints."""
        return [
            Route("/api/groups", json_endpoint(self._groups)),
            Route("/api/groups/{task}/{group}", json_endpoint(self._group)),
            Route("/api/groups/{task}/{group}/tokens", json_endpoint(self._tokens)),
        ]

    def about(self) -> dict[str, Any]:
        """Facts that the page needs before its first request."""
        statuses = [status.value for status in self._statuses]
        elsewhere = [status.value for status in self._elsewhere]
        facts = {"statuses": statuses, "elsewhere": elsewhere, "texts": self._texts.note}
        return {"run": self._run, "rollq": version("rollq"), **facts}

    def _groups(self, request: Request) -> Any:
        selection = selection_of(request, self._rollouts.tasks(), self._statuses)
        if same := request.query_params.get("prompt_of", ""):
            task, _, number = same.rpartition("/")
            if (group := self._group_named(task, number)).row is None:
                return _listed(Page((), 0, None, note="its prompt has no row in the prompts of its task"))
            selection = replace(selection, tasks=[task], row=group.row, record=group.fields["prompt"])
        after, limit = request.query_params.get("after", ""), number_of(request, "limit", 50)
        page = self._rollouts.page(selection, after=after, limit=limit)
        return _listed(page, selection.sample)

    def _group(self, request: Request) -> Any:
        group = self._look(request)
        return group_of(view_of(group), self._trained.of(group), self._texts)

    def _tokens(self, request: Request) -> Any:
        """Further tokens of a sample."""
        group = self._look(request)
        samples, index = view_of(group).samples, number_of(request, "sample", 0)
        if index >= len(samples):
            raise ValueError(f"sample {index}: the group has {len(samples)}")
        start, count = number_of(request, "start", 0), number_of(request, "count", 1000, least=1)
        annotations = self._trained.of(group).annotations
        return {"parts": tokens_of(samples[index], start, count, annotations, self._texts)}

    def _look(self, request: Request) -> FoundGroup:
        return self._group_named(request.path_params["task"], request.path_params["group"])

    def _group_named(self, task: str, text: str) -> FoundGroup:
        if (number := whole_number(text)) is None:
            raise Missing(f"{text[:40]!r} is not the number of a group")
        if (group := self._rollouts.look(task, number)) is None:
            raise Missing(f"there is no group {number} of {task}: it never existed, or has left")
        return group


def _listed(page: Page, sample: OneSample | None = None) -> dict[str, Any]:
    """A page of the list. `sample` has the conditions that one sample of each group satisfies."""
    return {
        "groups": [row_of(group, sample) for group in page.groups],
        "read": page.read,
        "after": page.after,
        "partial": page.is_partial,
        "note": page.note,
    }

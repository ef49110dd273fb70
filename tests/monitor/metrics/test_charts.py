"""The Grafana dashboard and the alerts ask for metrics that exist, and the guide lists all alerts."""

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import yaml

from rollq.monitor.metrics.catalogue import CALLS, METRICS, UP
from support.documented_commands import ROOT

DASHBOARD: dict[str, Any] = orjson.loads((ROOT / "compose" / "grafana" / "rollq.json").read_bytes())
BY_NAME = {metric.name: metric for metric in (UP, CALLS, *METRICS)}
ALERTS = (ROOT / "compose" / "alerts.yaml").read_text("utf-8")
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS)["groups"][0]["rules"]


def _expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["query"]["query"]
    yield from (rule["expr"] for rule in RULES)


EXPRESSIONS = list(_expressions())


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"\brollq_\w+", expression)
    assert names
    for name, labels in re.findall(r"\b(rollq_\w+)(?:\{([^}]*)\})?", expression):
        used = set(re.findall(r"(\w+)=~?", labels))
        assert used <= {"run", *BY_NAME[name].labels}
    for _, grouped in re.findall(r"\b(sum|max|min) by \(([^)]*)\)", expression):
        assert all(set(grouped.replace(" ", "").split(",")) <= {"run", *BY_NAME[name].labels} for name in names)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_and_nothing_else_are_seen_as_rates(expression: str) -> None:
    rated = set(re.findall(r"rate\((rollq_\w+)", expression))
    assert rated == {name for name in re.findall(r"\brollq_\w+", expression) if BY_NAME[name].is_counter}


def test_a_legend_names_labels_that_the_metrics_have() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\brollq_\w+", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert all(label in BY_NAME[name].labels for name in names), panel["title"]


def test_panels_do_not_overlap_and_name_the_provisioned_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "rollq"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert "uid: rollq\n" in (ROOT / "compose" / "grafana" / "datasource.yaml").read_text("utf-8")

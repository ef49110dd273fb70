"""A `RunStatus` as a collector of prometheus-client. Pure."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from rollq.monitor.metrics.catalogue import CALLS, METRICS, UP, Metric, Values
from rollq.monitor.status.read import RunStatus


class RunCollector(Collector):
    """The metrics of the run `run` with this `status`, None for a run that could not be read. `calls` counts
    `on_change` calls by outcome."""

    def __init__(self, run: str, status: RunStatus | None, calls: Mapping[str, int] = MappingProxyType({})) -> None:
        self._run, self._status, self._calls = run, status, calls

    def collect(self) -> Iterator[Family]:
        """Make the families that have a value."""
        yield self._family(UP, [((), float(self._status is not None))])
        if self._calls:
            yield self._family(CALLS, [((outcome,), number) for outcome, number in self._calls.items()])
        if self._status is not None:
            for metric in METRICS:
                if values := list(metric.read(self._status)):
                    yield self._family(metric, values)

    def _family(self, metric: Metric, values: Values) -> Family:
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.text, labels=("run", *metric.labels))
        for labels, value in values:
            family.add_metric((self._run, *labels), value)
        return family

"""Gauges that mirror state: it is read when somebody asks, so that no count is ever out of step with it."""

from collections.abc import Callable, Iterable, Iterator
from operator import add

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

GaugeRow = tuple[tuple[str, ...], float]


class GaugeCollector(Collector):
    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[GaugeMetricFamily]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._read()

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # nothing is read before the first scrape


def make_gauge(
    name: str,
    description: str,
    labels: tuple[str, ...],
    rows: Iterable[GaugeRow],
    combine: Callable[[float, float], float] = add,
) -> GaugeMetricFamily:
    """Rows with the same labels (runs beyond the cap, nodes of one name) are taken together: their sum."""
    sums: dict[tuple[str, ...], float] = {}
    for values, number in rows:
        sums[values] = combine(sums[values], number) if values in sums else number
    family = GaugeMetricFamily(name, description, labels=labels)
    for values, number in sums.items():
        family.add_metric(values, number)
    return family

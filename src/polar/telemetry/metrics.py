"""What metrics share: gauges that mirror state, and label values that stay few.

A gauge is read when somebody asks, so that no count is ever out of step with what it mirrors. Every value of a label is
a series that is kept for ever, so values that are sent to us are capped.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import add
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

MAX_RUN_LABELS = 100
OTHER_LABEL = "other"
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


class LabelCap:
    """The first so many values as they are, and all that come later as one."""

    def __init__(self, max_values: int, *known: str) -> None:
        self._max_values = max_values
        self._known = set(known)

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) < self._max_values:
            self._known.add(value)
            return value
        return OTHER_LABEL


def strip_password(url: str) -> str:
    """An address as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

"""Prometheus metrics of the data plane."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from polar.engines.pool import EnginePool
from polar.records.exchange import Exchange
from polar.telemetry.metrics import MAX_RUN_LABELS, GaugeCollector, LabelCap, make_gauge, strip_password


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._exchanges = Counter(
            "polar_exchanges", "Captured model calls", ("dialect", "status"), registry=self.registry
        )
        self._untrainable = Counter(
            "polar_untrainable", "Captured calls that may not be trained on", ("reason",), registry=self.registry
        )
        self._branches = Counter(
            "polar_branches",
            "Captured calls that could not go on from the turn before, and why",
            ("reason",),
            registry=self.registry,
        )
        tokens = Counter("polar_tokens", "Tokens", ("kind",), registry=self.registry)
        self._prompt_tokens, self._cached_tokens, self._sampled_tokens = (
            tokens.labels(kind) for kind in ("prompt", "cached", "sampled")
        )
        self._first_token = Histogram(
            "polar_first_token_seconds",
            "From the request to its first sampled token",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.running_calls = Gauge("polar_calls_running", "Model calls in progress", registry=self.registry)

    def record_exchange(self, exchange: Exchange) -> None:
        self._exchanges.labels(exchange.dialect, exchange.status).inc()
        if exchange.untrainable is not None:
            self._untrainable.labels(exchange.untrainable).inc()
        if exchange.branch_reason is not None:
            self._branches.labels(exchange.branch_reason).inc()
        self._prompt_tokens.inc(exchange.usage.prompt)
        self._cached_tokens.inc(exchange.usage.cached)
        self._sampled_tokens.inc(exchange.usage.completion)
        if exchange.first_token_at is not None:
            self._first_token.observe(max(0.0, exchange.first_token_at - exchange.started_at))

    def watch_pools(self, pools: Callable[[], Mapping[str, EnginePool]]) -> None:
        """Adds metrics of the engine pools. `pools` returns them by run; runs without a pool share "default"."""
        run_label = LabelCap(MAX_RUN_LABELS, "default")

        def iter_replicas() -> Iterable[tuple[tuple[str, str], int, bool]]:
            for name, pool in pools().items():
                for replica in pool.replicas:
                    labels = run_label(name), strip_password(replica.url)
                    yield labels, len(replica.running), replica.down

        def collect_gauges() -> Iterable[GaugeMetricFamily]:
            gates = [((run_label(name),), pool.gate) for name, pool in pools().items()]
            labels = ("run", "replica")
            yield make_gauge(
                "polar_engine_calls",
                "Model calls at a replica",
                labels,
                ((values, calls) for values, calls, _ in iter_replicas()),
            )
            yield make_gauge(
                "polar_engine_down",
                "1 where a replica did not answer, and is left alone for a while",
                labels,
                ((values, down) for values, _, down in iter_replicas()),
                max,
            )
            yield make_gauge(
                "polar_calls_held",
                "Model calls that wait for generation to go on",
                ("run",),
                ((values, gate.held) for values, gate in gates),
            )
            yield make_gauge(
                "polar_paused",
                "1 while generation is paused",
                ("run",),
                ((values, gate.paused) for values, gate in gates),
                max,
            )

        GaugeCollector(self.registry, collect_gauges)

"""Prometheus metrics of the data plane."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polar.store.base import Exchange


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._exchanges = Counter(
            "polar_exchanges", "Captured model calls", ("dialect", "status"), registry=self.registry
        )
        self._untrainable = Counter(
            "polar_untrainable", "Captured calls that may not be trained on", ("reason",), registry=self.registry
        )
        tokens = Counter("polar_tokens", "Tokens", ("kind",), registry=self.registry)
        self._prompt, self._cached, self._sampled = (tokens.labels(kind) for kind in ("prompt", "cached", "sampled"))
        self._first_token = Histogram(
            "polar_first_token_seconds",
            "From the request to its first sampled token",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.running = Gauge("polar_calls_running", "Model calls in progress", registry=self.registry)

    def captured(self, exchange: Exchange) -> None:
        self._exchanges.labels(exchange.dialect, exchange.status).inc()
        if exchange.untrainable is not None:
            self._untrainable.labels(exchange.untrainable).inc()
        self._prompt.inc(exchange.usage.prompt)
        self._cached.inc(exchange.usage.cached)
        self._sampled.inc(exchange.usage.completion)
        if exchange.first_token_at is not None:
            self._first_token.observe(max(0.0, exchange.first_token_at - exchange.started_at))

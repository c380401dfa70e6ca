"""Prometheus metrics of the automatic check: how many sessions it saw, what it held back, and what it cost."""

from prometheus_client import CollectorRegistry, Counter

from polar.trajectory.checker import HeldBackError


class VerifyMetrics:
    """Counts hand-outs: a session that is read twice is checked, and counted, twice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        sessions = Counter(
            "polar_verified_sessions",
            "Sessions on their way to a trainer: checked and passed, held back, or not in the share that is checked",
            ("result",),
            registry=registry,
        )
        self._passed, self._failed, self._error, self._skipped = (
            sessions.labels(result) for result in ("passed", "verify_failed", "verify_error", "skipped")
        )
        self._problems = Counter(
            "polar_verify_problems",
            "Sessions that failed verification, by the kind of their first problem",
            ("kind",),
            registry=registry,
        )
        self._seconds = Counter("polar_verify_cpu_seconds", "CPU seconds that verification took", registry=registry)

    def session_checked(self, held: HeldBackError | None) -> None:
        if held is None:
            self._passed.inc()
        elif held.reason == "verify_error":
            self._error.inc()
        else:
            self._failed.inc()
            self._problems.labels(held.kind).inc()

    def session_skipped(self) -> None:
        self._skipped.inc()

    def seconds_spent(self, seconds: float) -> None:
        self._seconds.inc(seconds)

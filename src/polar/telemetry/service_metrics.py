"""Prometheus metrics of the rollout service: its queue, its nodes, what became of sessions, and the automatic check.

What has happened is counted as it is told (`leased`, `ended`, ...). How things stand is read when somebody asks. No
label has the name of a session or task: there is no end to those.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from polar.records.session import Evidence, HeldBackError, is_suspicious
from polar.telemetry.metrics import MAX_RUN_LABELS, GaugeCollector, LabelCap, make_gauge

_MAX_REASON_LABELS = 50
_MAX_STAGE_LABELS = 20
_STATES = ("queued", "leased", "waiting")
_STAGES = ("waiting", "init", "ready", "run", "postrun")
_SECONDS_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_REWARD_BUCKETS = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10)
_LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class LiveNode(Protocol):
    """What is read of a node."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def load(self) -> Mapping[str, Any]: ...  # as the node told it last; empty before that


class ServiceMetrics:
    """`queue` tells the work of each run by its state, `nodes` those that are alive, and `callbacks` how many tasks
    have ended whose callbacks nobody has acknowledged yet."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        queue: Callable[[], Mapping[str, Mapping[str, int]]],
        nodes: Callable[[], Iterable[LiveNode]],
        callbacks: Callable[[], int],
    ) -> None:
        self._queue = queue
        self._nodes = nodes
        self._callbacks = callbacks
        self._run_label = LabelCap(MAX_RUN_LABELS, "default")
        self._reason_label = LabelCap(_MAX_REASON_LABELS, "")
        self._stage_label = LabelCap(_MAX_STAGE_LABELS)
        self._leases = Counter("polar_leases", "Work that was given to a node", registry=registry)
        self._expiries = Counter("polar_lease_expiries", "Leases whose node was not heard of", registry=registry)
        self._retries = Counter("polar_retries", "Work that is tried again", ("reason",), registry=registry)
        self._ended = Counter(
            "polar_sessions_ended",
            "Sessions that have ended; the reason is why there is no reward, if somebody said so",
            ("run", "reason"),
            registry=registry,
        )
        self._reward = Histogram(
            "polar_reward", "Rewards of sessions", ("run",), buckets=_REWARD_BUCKETS, registry=registry
        )
        self._earned = Counter(  # a histogram that may go below 0 has no sum
            "polar_reward_earned",
            "Sums of rewards above 0, and of those below 0 without their sign",
            ("run", "sign"),
            registry=registry,
        )
        self._lag = Histogram(
            "polar_policy_lag",
            "Versions by which the policy was ahead of a session's oldest tokens when it ended",
            ("run",),
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self._seconds = Histogram(
            "polar_stage_seconds",
            "Seconds that a session was in a stage, or waited for it",
            ("stage",),
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._evidence = Counter(
            "polar_tampering_evidence",
            "Observations that an agent interfered with its grading; proven ones can't be explained by honest work",
            ("run", "kind", "proven"),
            registry=registry,
        )
        self._suspicious = Counter(
            "polar_sessions_suspicious", "Sessions with proven evidence of tampering", ("run",), registry=registry
        )
        self._callbacks_failed = Counter(
            "polar_callbacks_failed",
            "Callbacks that nobody acknowledged, and that were given up",
            registry=registry,
        )
        GaugeCollector(registry, self._read_gauges)

    # What has happened

    def count_leased(self, count: int) -> None:
        self._leases.inc(count)

    def count_expired(self, count: int) -> None:
        self._expiries.inc(count)

    def count_retried(self, reason: str) -> None:
        self._retries.labels(self._reason_label(reason)).inc()

    def count_ended(
        self, run: str, reward: float | None, reason: str | None, seconds: Mapping[str, float], lag: int | None
    ) -> None:
        """A session has ended for good. `lag` is None where it sampled nothing, or nobody knows by which policy."""
        run = self._run_label(run)
        self._ended.labels(run, self._reason_label(reason or "")).inc()
        if reward is not None:
            self._reward.labels(run).observe(reward)
            self._earned.labels(run, "positive").inc(max(0.0, reward))  # both are there from the first on
            self._earned.labels(run, "negative").inc(max(0.0, -reward))
        if lag is not None:
            self._lag.labels(run).observe(max(0, lag))
        for stage, spent in seconds.items():
            self._seconds.labels(self._stage_label(stage)).observe(spent)

    def count_evidence(self, run: str, evidence: Sequence[Evidence]) -> None:
        """Of a session that has ended."""
        run = self._run_label(run)
        for one in evidence:
            self._evidence.labels(run, one.kind, str(one.proven).lower()).inc(one.count)
        self._suspicious.labels(run).inc(is_suspicious(evidence))

    def count_failed_callback(self) -> None:
        self._callbacks_failed.inc()

    # How things stand

    def _read_gauges(self) -> Iterable[GaugeMetricFamily]:
        queue, nodes = self._queue(), list(self._nodes())
        yield make_gauge(
            "polar_work",
            "Sessions that are still to be run, or are being run",
            ("run", "state"),
            (
                ((self._run_label(run), state), counts.get(state, 0))
                for run, counts in queue.items()
                for state in _STATES
            ),
        )
        yield make_gauge("polar_nodes", "Nodes that are alive", (), [((), len(nodes))])
        yield make_gauge(
            "polar_node_slots",
            "Sessions that a node can run at the same time",
            ("node",),
            (((node.name,), node.slots) for node in nodes),
        )
        yield make_gauge(
            "polar_node_sessions",
            "Sessions in each stage; those with postrun may still wait for it",
            ("node", "stage"),
            (((node.name, stage), _load_number(node, stage)) for node in nodes for stage in _STAGES),
        )
        yield make_gauge(
            "polar_node_calls",
            "Model calls at the engines, and those that wait for generation to go on",
            ("node", "state"),
            (
                ((node.name, state), _load_number(node, key))
                for node in nodes
                for state, key in (("running", "calls"), ("held", "held"))
            ),
        )
        yield make_gauge(
            "polar_callbacks_pending",
            "Tasks that have ended, and whose callbacks nobody has acknowledged yet",
            (),
            [((), self._callbacks())],
        )


def _load_number(node: LiveNode, key: str) -> float:
    """What a node tells of itself need not be what we expect: whoever looks at the others still can."""
    told = node.load.get(key)
    return told if isinstance(told, int | float) else 0


class VerifyMetrics:
    """The automatic check: how many sessions it saw, what it held back, and what it cost. Counts hand-outs: a session
    that is read twice is checked, and counted, twice."""

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

    def record_check(self, held: HeldBackError | None) -> None:
        if held is None:
            self._passed.inc()
        elif held.reason == "verify_error":
            self._error.inc()
        else:
            self._failed.inc()
            self._problems.labels(held.kind).inc()

    def record_skip(self) -> None:
        self._skipped.inc()

    def add_seconds(self, seconds: float) -> None:
        self._seconds.inc(seconds)

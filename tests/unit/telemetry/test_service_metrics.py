"""What Prometheus is told of the service: counts of what happened, and the state as it is at that moment."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest

from polar.telemetry.metrics import MAX_RUN_LABELS, LabelCap, strip_password
from polar.telemetry.service_metrics import ServiceMetrics


class Node(Struct):
    name: str
    slots: int
    load: dict[str, Any] = {}


class Service:
    """The state that is read, and what is told of it."""

    def __init__(self) -> None:
        self.queue: dict[str, dict[str, int]] = {}
        self.nodes: list[Node] = []
        self.callbacks = 0
        self.registry = CollectorRegistry()
        self.metrics = ServiceMetrics(
            self.registry, queue=lambda: self.queue, nodes=lambda: self.nodes, callbacks=lambda: self.callbacks
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def labelled(self, name: str) -> list[Mapping[str, str]]:
        return [sample.labels for family in self.registry.collect() for sample in family.samples if sample.name == name]


def test_state_is_read_when_it_is_asked_for() -> None:
    service = Service()
    assert service.value("polar_nodes") == 0
    service.queue = {"default": {"queued": 3, "leased": 2, "waiting": 1, "done": 9}}
    service.nodes = [Node("a", 16, {"waiting": 1, "init": 2, "run": 5, "calls": 4, "held": 1, "paused": True})]
    service.callbacks = 2
    assert service.value("polar_work", run="default", state="queued") == 3
    assert service.value("polar_work", run="default", state="leased") == 2
    assert service.value("polar_work", run="default", state="waiting") == 1
    assert service.value("polar_nodes") == 1
    assert service.value("polar_node_slots", node="a") == 16
    assert service.value("polar_node_sessions", node="a", stage="run") == 5
    assert service.value("polar_node_sessions", node="a", stage="postrun") == 0
    assert service.value("polar_node_calls", node="a", state="running") == 4
    assert service.value("polar_node_calls", node="a", state="held") == 1
    assert service.value("polar_callbacks_pending") == 2
    service.queue, service.nodes = {}, []
    assert service.labelled("polar_work") == []  # what is gone is not told of any more
    assert service.labelled("polar_node_slots") == []


def test_nodes_of_one_name_are_taken_together() -> None:
    service = Service()
    service.nodes = [Node("a", 4, {"run": 1}), Node("a", 8, {"run": 2}), Node("b", 1, {"run": "?", "init": None})]
    assert service.value("polar_node_slots", node="a") == 12
    assert service.value("polar_node_sessions", node="a", stage="run") == 3
    assert service.value("polar_node_sessions", node="b", stage="run") == 0
    assert service.value("polar_nodes") == 3


def test_what_happened_is_counted() -> None:
    service = Service()
    told = service.metrics
    told.count_leased(3)
    told.count_leased(1)
    told.count_expired(2)
    told.count_retried("node_lost")
    told.count_retried("node_lost")
    told.count_retried("engine_failed")
    told.count_failed_callback()
    assert service.value("polar_callbacks_failed_total") == 1
    assert service.value("polar_leases_total") == 4
    assert service.value("polar_lease_expiries_total") == 2
    assert service.value("polar_retries_total", reason="node_lost") == 2
    assert service.value("polar_retries_total", reason="engine_failed") == 1


def test_sessions_that_end() -> None:
    service = Service()
    service.metrics.count_ended("r", 1.0, None, {"run": 20.0, "init": 0.2}, 0)
    service.metrics.count_ended("r", 0.0, None, {"run": 40.0}, 3)
    service.metrics.count_ended("r", None, "node_lost", {}, None)
    assert service.value("polar_sessions_ended_total", run="r", reason="") == 2
    assert service.value("polar_sessions_ended_total", run="r", reason="node_lost") == 1
    assert service.value("polar_reward_earned_total", run="r", sign="negative") == 0  # there, for differences
    service.metrics.count_ended("r", -0.25, None, {}, None)
    assert service.value("polar_reward_count", run="r") == 3
    assert service.value("polar_reward_bucket", run="r", le="0.0") == 2
    assert service.value("polar_reward_earned_total", run="r", sign="positive") == 1
    assert service.value("polar_reward_earned_total", run="r", sign="negative") == 0.25
    assert service.value("polar_policy_lag_count", run="r") == 2
    assert service.value("polar_policy_lag_bucket", run="r", le="0.0") == 1
    assert service.value("polar_policy_lag_bucket", run="r", le="3.0") == 2
    assert service.value("polar_stage_seconds_count", stage="run") == 2
    assert service.value("polar_stage_seconds_bucket", stage="run", le="30.0") == 1
    assert service.value("polar_stage_seconds_sum", stage="init") == 0.2


def test_labels_stay_few() -> None:
    service = Service()
    runs = [f"run-{number}" for number in range(MAX_RUN_LABELS + 50)]
    for run in runs:
        service.metrics.count_ended(run, 1.0, f"why-{run}", {f"stage-{run}": 1.0}, 0)
        service.metrics.count_retried(f"why-{run}")
    service.metrics.count_ended("default", 1.0, None, {}, 0)
    service.queue = {run: {"queued": 1} for run in runs}
    told = service.labelled("polar_reward_count")
    assert len(told) == MAX_RUN_LABELS + 1
    assert {"run": "default"} in told  # there is always room for it
    assert service.value("polar_reward_count", run="other") == 51
    assert service.value("polar_work", run="other", state="queued") == 51
    work: list[Any] = service.labelled("polar_work")
    assert len(work) == 3 * MAX_RUN_LABELS  # all but "default", which has none
    assert len(service.labelled("polar_retries_total")) < 60
    assert len(service.labelled("polar_stage_seconds_count")) < 30
    assert len(generate_latest(service.registry)) < 400_000


def test_a_value_that_is_known_stays() -> None:
    capped = LabelCap(2, "kept")
    assert [capped(value) for value in ("a", "b", "a", "kept", "c")] == ["a", "other", "a", "kept", "other"]


def test_addresses_are_told_without_passwords() -> None:
    assert strip_password("http://me:pa%40ss@host:8000/v1") == "http://host:8000/v1"
    assert strip_password("http://[::1]:8000") == "http://[::1]:8000"

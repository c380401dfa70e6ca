"""What Prometheus is told of the data plane and its engines."""

from typing import Any, cast

from msgspec import Struct, field

from polar.engines.pool import EnginePool
from polar.gateway.metrics import GatewayMetrics
from polar.records.exchange import Exchange, RawRequest
from polar.types import Usage


class Replica(Struct):
    url: str
    running: set[int] = field(default_factory=set)
    down: bool = False


class Gate(Struct):
    held: int = 0
    paused: bool = False


class Engines(Struct):
    replicas: list[Replica]
    gate: Gate = field(default_factory=Gate)


def watched(pools: dict[str, Engines]) -> GatewayMetrics:
    metrics = GatewayMetrics()
    metrics.watch_pools(lambda: cast("dict[str, EnginePool]", pools))
    return metrics


def exchange(**fields: Any) -> Exchange:
    known: dict[str, Any] = {
        "exchange_id": "x",
        "session_id": "s",
        "seq": 0,
        "dialect": "d",
        "params": {},
        "hints": {},
        "raw_request": RawRequest({}, "messages", []),
        "status": "complete",
        "started_at": 10.0,
        "ended_at": 12.0,
    }
    return Exchange(**(known | fields))


def test_forks_are_counted_by_reason() -> None:
    metrics = GatewayMetrics()
    for reason in ("text_changed", None, "text_changed"):
        metrics.record_exchange(exchange(branch_reason=reason, usage=Usage(prompt=7, completion=3, cached=2)))
    value = metrics.registry.get_sample_value
    assert value("polar_branches_total", {"reason": "text_changed"}) == 2
    assert value("polar_exchanges_total", {"dialect": "d", "status": "complete"}) == 3
    assert value("polar_tokens_total", {"kind": "prompt"}) == 21
    assert value("polar_tokens_total", {"kind": "cached"}) == 6
    assert value("polar_tokens_total", {"kind": "sampled"}) == 9


def test_engines_are_read_as_they_are_now() -> None:
    pools = {"default": Engines([Replica("http://me:secret@a:1", {1, 2}), Replica("http://b:1", down=True)])}
    value = watched(pools).registry.get_sample_value
    a, b = ({"run": "default", "replica": url} for url in ("http://a:1", "http://b:1"))
    assert (value("polar_engine_calls", a), value("polar_engine_calls", b)) == (2, 0)
    assert (value("polar_engine_down", a), value("polar_engine_down", b)) == (0, 1)
    assert (value("polar_calls_held", {"run": "default"}), value("polar_paused", {"run": "default"})) == (0, 0)
    pools["default"].gate = Gate(held=3, paused=True)
    pools["default"].replicas.pop()
    pools["mine"] = Engines([Replica("http://c:1", {1})])
    assert value("polar_engine_calls", b) is None
    assert value("polar_engine_calls", {"run": "mine", "replica": "http://c:1"}) == 1
    assert value("polar_calls_held", {"run": "default"}) == 3
    assert value("polar_paused", {"run": "default"}) == 1
    assert value("polar_paused", {"run": "mine"}) == 0


def test_runs_beyond_the_cap_are_one() -> None:
    pools = {f"run-{number}": Engines([Replica("http://a:1", {1})], Gate(1, True)) for number in range(105)}
    value = watched(pools).registry.get_sample_value
    assert value("polar_engine_calls", {"run": "other", "replica": "http://a:1"}) == 6
    assert value("polar_calls_held", {"run": "other"}) == 6
    assert value("polar_paused", {"run": "other"}) == 1  # not six times

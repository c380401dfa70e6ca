"""The whole benchmark, very small and without LiteLLM: every server starts, every measurement gives its part."""

import io
import os

import msgspec
import pytest
from rich.console import Console

from polar.bench import calls, gateway, gateway_report
from polar.bench.peers import FASTAPI, POLAR, RELAY


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.slow
async def test_run() -> None:
    plan = gateway.GatewayPlan(
        rounds=1,
        calls={POLAR: (1, 1), RELAY: (1, 1), FASTAPI: (1, 1)},
        dialect_calls=1,
        pairs=2,
        streams=10,
        stream_seconds=0.3,
        ramp_seconds=0.1,
        sessions=20,
        large_sessions=2,
        settle_seconds=0.1,
    )
    cores = os.sched_getaffinity(0)
    measured = await gateway.run(plan, None, lambda _: None)
    assert os.sched_getaffinity(0) == cores
    assert set(measured.costs["S"]) == set(measured.costs["L"]) == {POLAR, RELAY, FASTAPI}
    assert all(cost.cpu > 0 for costs in measured.costs.values() for cost in costs.values())
    assert set(measured.dialects) == set(calls.DIALECTS)
    assert len(measured.added) == 3 * 4
    assert measured.streams is not None
    assert measured.streams.tokens == 10 * 3
    assert measured.memory is not None
    assert measured.memory.connected > 0

    assert set(msgspec.json.decode(gateway_report.as_json(measured))) >= {"cpu_per_call", "first_byte", "promises"}
    console = Console(record=True, width=120, file=io.StringIO())
    gateway_report.show(measured, console)
    assert "FastAPI" in console.export_text()

"""`make bench-service`: what is promised, and a small run of all of it on SQLite."""

import io
import os
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.client import BenchmarkError
from benchmarks.service import benchmark as service
from benchmarks.service import databases as service_databases
from benchmarks.service import peers as service_peers
from benchmarks.service import throughput as service_throughput
from benchmarks.service.benchmark import ServicePlan, ServiceReport
from benchmarks.service.long_queue import FINISH, LEASE, SUBMIT, CallCosts, QueueCosts
from benchmarks.service.results import FASTAPI, POLAR, ReadCosts
from benchmarks.service.throughput import NODE, ONE_PROCESS, TWO_WORKERS, Throughput

MB = 1_000_000


def report(*, rate: float, speed: float, peak: int, ratio: float, many: int = 100_000) -> ServiceReport:
    short = CallCosts({SUBMIT: 4.0, LEASE: 2.0, FINISH: 3.0}, {SUBMIT: 1.0, LEASE: 1.0, FINISH: 1.0})
    long = CallCosts({call: ms * ratio for call, ms in short.ms.items()}, short.cpu_ms)
    return ServiceReport(
        ServicePlan(),
        [
            Throughput(ONE_PROCESS, "SQLite", 10, rate, {"server": 1.5}),
            Throughput(NODE, "SQLite", 10, 1, {"server": 9.0}),
        ],
        [ReadCosts(POLAR, "SQLite", 9, 50_000, MB, speed, 15), ReadCosts(FASTAPI, "SQLite", 9, 50_000, MB, 1, 40)],
        [QueueCosts("SQLite", 1_000, many, 4_000, 100 * MB, peak - MB, peak, short, long)],
    )


def test_promises_are_judged_by_their_figures() -> None:
    good = report(rate=300, speed=50, peak=399 * MB, ratio=1.25)
    assert [promise.reached for promise in service.list_promises(good)] == [True] * 5
    bad = report(rate=299, speed=49.9, peak=400 * MB, ratio=1.26)
    assert [promise.reached for promise in service.list_promises(bad)] == [False] * 5


def test_a_short_queue_says_nothing_of_what_is_promised_of_a_long_one() -> None:
    few = report(rate=300, speed=50, peak=900 * MB, ratio=2, many=20_000)
    assert [promise.promised for promise in service.list_promises(few)] == ["at least 300", "at least 50 MB/s"]


def test_the_time_of_a_family_is_counted() -> None:
    before = service_databases.read_family_cpu(os.getpid())
    while service_databases.read_family_cpu(os.getpid()) == before:
        sum(range(100_000))
    assert service_databases.read_family_cpu(os.getpid()) > before


async def test_a_peer_that_is_not_there_is_said_to_be_absent(tmp_path: Path) -> None:
    with service_databases.open_backends("postgresql://nobody@127.0.0.1:1/none", tmp_path) as (kinds, _):
        assert "--peer-python" in str(await service_peers.measure("huey", kinds, 10, [], tmp_path))
        missing = tmp_path / "python"
        assert str(missing) in str(await service_peers.measure("huey", kinds, 10, [missing], tmp_path))
        assert await service_peers.measure("procrastinate", kinds[:1], 10, [], tmp_path) == "there is no PostgreSQL"


@pytest.mark.faults  # half a minute of servers and sessions
async def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pgserver.postgres_server", None)  # as if it were not installed
    told: list[str] = []
    plan = ServicePlan(sessions=120, node_sessions=12, rounds=1, results=2, few=30, many=60, calls=2, jobs=10)
    measured = await service.run(plan, None, [], told.append)
    assert [(one.form, one.database, one.sessions) for one in measured.through] == [
        (ONE_PROCESS, "SQLite", 120),
        (TWO_WORKERS, "SQLite", 120),
        (NODE, "SQLite", 12),
    ]
    assert [sorted(one.cpu_ms) for one in measured.through] == [
        ["client", "server"],
        ["client", "server", "workers"],
        ["client", "server"],
    ]
    assert all(figure > 0 for one in measured.through for figure in one.cpu_ms.values())
    ours, theirs = measured.read
    assert (ours.server, theirs.server) == (POLAR, FASTAPI)
    assert abs(ours.tokens - 50_000) < 2_500
    [queued] = measured.queued
    assert (queued.few, queued.many) == (30, 60)
    assert 0 < queued.before <= queued.peak
    assert list(queued.long.ms) == [SUBMIT, LEASE, FINISH]
    assert set(measured.absent) == {"PostgreSQL", "huey", "procrastinate"}
    assert len(told) == 7
    decoded = msgspec.json.decode(service.to_json(measured))
    assert decoded["read"][0]["mb_per_second"] == ours.mb_per_second
    shown = io.StringIO()
    service.print_report(measured, Console(file=shown, width=150))
    assert "two worker processes over HTTP" in shown.getvalue()
    assert "PostgreSQL was not measured: name a server with --postgres" in shown.getvalue()


@pytest.mark.faults  # half a minute of servers and sessions
async def test_a_round_in_which_sessions_fail_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = '{"task_id": "any", "instruction": "", "runtime": {"backend": "simulated"}, "agent": {"harness": "none"}}'
    monkeypatch.setattr(service_throughput, "make_node_task", lambda: broken)
    kind = service_databases.DatabaseBackend("SQLite", service_databases.open_sqlite)
    with pytest.raises(BenchmarkError, match="only 0 went well"):
        await service_throughput.measure(NODE, kind, 50, 1, tmp_path)

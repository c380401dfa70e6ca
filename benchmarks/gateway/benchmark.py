"""`make bench-gateway`: what capturing a call costs, against the usual ways to put a proxy there.

Every server runs in a process of its own, pinned to one core; the load generator and the stand-in engine share this
process on another. Servers take turns in short rounds, so that whatever else the machine does hits all of them alike.

Each measurement is one function from a `GatewayBench` to its part of the report; `MEASUREMENTS` lists them in the order
in which they run.
"""

import asyncio
import contextlib
import gc
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Raw, Struct, field
from rich.console import Console

from benchmarks import calls
from benchmarks.calls import TURNS, CallSize, L, S
from benchmarks.client import BenchmarkError, Connection, encode_get
from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.gateway.engine import FakeEngine
from benchmarks.gateway.load import (
    CALLERS,
    FASTAPI,
    LITELLM,
    LITELLM_VLLM,
    OTHER,
    POLAR,
    RELAY,
    Cost,
    Target,
    check_answer,
    measure,
)
from benchmarks.gateway.report import AddedLatency, GatewayReport, SessionMemory, StreamDelays, print_report, to_json
from benchmarks.gateway.servers import LITELLM_VERSION, Servers, find_litellm, install_litellm
from benchmarks.polar_server import LoopReport
from benchmarks.process import run_async
from polar.errors import ConfigError

CALLS_EACH = {
    POLAR: (40, 20),
    OTHER: (40, 20),
    RELAY: (40, 20),
    FASTAPI: (10, 5),
    LITELLM: (2, 1),
    LITELLM_VLLM: (2, 1),
}
"""Calls that each caller makes per round, S and L: about a second of work each."""


class GatewayPlan(Struct, frozen=True):
    """How much is measured."""

    rounds: int = 8
    calls: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(CALLS_EACH))
    dialect_calls: int = 20
    pairs: int = 400  # of a direct call and one through a server
    slow_pairs: int = 20  # through LiteLLM
    streams: int = 500
    stream_seconds: float = 20.0
    ramp_seconds: float = 10.0  # in which the streams begin, one after another
    sessions: int = 10_000
    large_sessions: int = 500
    settle_seconds: float = 2.0


QUICK = GatewayPlan(
    rounds=2, pairs=150, slow_pairs=5, stream_seconds=8.0, ramp_seconds=4.0, sessions=2_000, large_sessions=100
)


class GatewayBench:
    """What measurements share."""

    def __init__(self, plan: GatewayPlan, engine: FakeEngine, servers: Servers, progress: Progress) -> None:
        self.plan = plan
        self.engine = engine
        self.servers = servers
        self.direct = Target("engine", engine.port, None)
        self.targets: dict[str, Target] = {}
        self.progress = progress
        self.report = GatewayReport()

    @property
    def polar(self) -> Target:
        return self.targets[POLAR]


async def run(
    plan: GatewayPlan,
    litellm_environment: Path | None,
    progress: Progress,
    *,
    against: Path | None = None,
    measurements: Sequence["Measurement"] | None = None,
) -> GatewayReport:
    """Runs all measurements, or those given. Without an environment LiteLLM is left out; `against` is another
    checkout of Polar, measured beside this one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("The benchmark needs two cores: one for the server, one for the load.")
    _allow_files(plan.sessions + 1_000)
    os.sched_setaffinity(0, {cores[0]})
    try:
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-bench-")))
            engine = await stack.enter_async_context(FakeEngine())
            servers = await stack.enter_async_context(Servers(engine.url, cores[-1], folder))
            bench = GatewayBench(plan, engine, servers, progress)
            progress("starting the servers")
            bench.targets = await servers.start_all(litellm_environment, against)
            for measurement in MEASUREMENTS if measurements is None else measurements:
                _collect_garbage()
                await measurement(bench)
            return bench.report
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)


def _allow_files(count: int) -> None:
    """A connection is an open file; the servers inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < count:
        raise ConfigError(f"The benchmark holds {count} files open, and {hard} are allowed: see ulimit -Hn.")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def _collect_garbage() -> None:
    """Our own garbage collector must not show in a server's latencies."""
    gc.enable()
    gc.collect()
    gc.disable()


# CPU per call and throughput


async def measure_cpu_per_call(bench: GatewayBench) -> None:
    for target in bench.targets.values():
        for size in (S, L):
            await measure(target, size, 1)  # warm
    for number in range(bench.plan.rounds):
        bench.progress(f"CPU per call, round {number + 1} of {bench.plan.rounds}")
        for index, size in enumerate((S, L)):
            for target in bench.targets.values():
                cost = await measure(target, size, bench.plan.calls[target.name][index])
                bench.report.costs.setdefault(size.name, {}).setdefault(target.name, Cost()).add(cost)
    await _check_capture(bench)


async def measure_dialect_cpu(bench: GatewayBench) -> None:
    for dialect in calls.DIALECTS:
        await measure(bench.polar, S, 1, dialect)
    for number in range(bench.plan.rounds):
        bench.progress(f"dialects, round {number + 1} of {bench.plan.rounds}")
        for dialect in calls.DIALECTS:
            cost = await measure(bench.polar, S, bench.plan.dialect_calls, dialect)
            bench.report.dialects.setdefault(dialect, Cost()).add(cost)


class _Exchange(Struct):
    seq: int
    prompt_ids: list[int] | None
    sampled_ids: list[int] | None
    logprobs: list[float] | None
    untrainable: str | None
    request: dict[str, Raw]


async def _check_capture(bench: GatewayBench) -> None:
    """The figures are those of a gateway that kept everything, or there are none."""
    assert bench.polar.control_port is not None
    connection = await Connection.open(bench.polar.control_port)
    answer = await connection.call(encode_get(f"/sessions/{bench.polar.sessions[0]}/exchanges"))
    connection.close()
    exchanges = msgspec.json.decode(answer.read_content(), type=list[_Exchange])
    for exchange in exchanges:
        kept = (len(exchange.sampled_ids or ()), len(exchange.logprobs or ()))
        if kept != (L.sampled_tokens, L.sampled_tokens) or not exchange.prompt_ids or exchange.untrainable:
            raise BenchmarkError(f"Polar did not capture a call whole: {kept}, {exchange.untrainable}.")
    if not exchanges:
        raise BenchmarkError("Polar captured nothing.")


# Added latency


async def measure_added_latency(bench: GatewayBench) -> None:
    for size in (S, L):
        for stream in (True, False):
            for target in bench.targets.values():
                form = "streamed" if stream else "whole"
                bench.progress(f"first byte of {size.name}, {form}, through {target.name}")
                pairs = bench.plan.slow_pairs if target.name in (LITELLM, LITELLM_VLLM) else bench.plan.pairs
                bench.report.added.append(await _measure_first_byte(bench, target, size, stream, pairs))


async def _measure_first_byte(
    bench: GatewayBench, target: Target, size: CallSize, stream: bool, pairs: int
) -> AddedLatency:
    warm = TURNS
    keys = await target.create_keys((warm + pairs) // TURNS + 1)
    ways = [(it, await Connection.open(it.port)) for it in (bench.direct, target)]
    direct: list[float] = []
    added: list[float] = []
    for index in range(warm + pairs):
        turn = index % TURNS
        if turn == 0:
            key = next(keys)
            sessions = [it.open_session(key) for it, _ in ways]
        took = []
        for session, (_, connection) in zip(sessions, ways, strict=True):
            answer = await connection.call(session.make_request(size, turn, stream=stream))
            took.append((answer.first_at - answer.sent_at) * 1e3)
        if index >= warm:
            direct.append(took[0])
            added.append(took[1] - took[0])
    for _, connection in ways:
        connection.close()
    return AddedLatency(
        target.name, size.name, stream, len(added), statistics.median(direct), *_compute_percentiles(added)
    )


# Many streams


_STAMP = re.compile(rb"~(\d{18})")


async def measure_many_streams(bench: GatewayBench) -> None:
    plan = bench.plan
    bench.progress(f"{plan.streams} streams of 10 tokens a second for {plan.stream_seconds:g} s")
    through: list[float] = []
    direct: list[float] = []
    keys = await bench.polar.create_keys(plan.streams)
    pace = bench.engine.pace
    pace.tokens, pace.interval = int(plan.stream_seconds * 10), 0.1

    async def stream(target: Target, key: str, start: float, delays: list[float]) -> None:
        def arrived(data: bytes) -> None:
            now = time.monotonic_ns()
            delays.extend((now - int(stamp)) / 1e6 for stamp in _STAMP.findall(data))

        await asyncio.sleep(start)
        connection = await Connection.open(target.port)
        await connection.call(target.open_session(key).make_request(S, 5, stream=True), arrived)
        connection.close()

    step = plan.ramp_seconds / plan.streams
    running = [stream(bench.polar, key, index * step, through) for index, key in enumerate(keys)]
    # A few straight to the engine at the same time: what the machine and the load generator take by themselves.
    running += [stream(bench.direct, "none", index * step * 10, direct) for index in range(plan.streams // 10)]
    server = bench.polar.server
    assert server is not None
    server.send_line("watch")
    cpu, started_at = server.read_cpu_seconds(), time.monotonic()
    await asyncio.gather(*running)
    seconds = time.monotonic() - started_at
    cpu = server.read_cpu_seconds() - cpu
    pace.tokens = 0
    server.send_line("report")
    watched = await server.read_message(LoopReport)
    expected = plan.streams * int(plan.stream_seconds * 10)
    if len(through) != expected:
        raise BenchmarkError(f"{len(through)} of {expected} tokens came through.")
    baseline = statistics.median(direct)
    p50, p99 = _compute_percentiles(through)
    bench.report.streams = StreamDelays(
        streams=plan.streams,
        tokens=expected,
        seconds=seconds,
        cpu_per_token_us=cpu / expected * 1e6,
        core_busy=cpu / seconds,
        direct_p50=baseline,
        added_p50=p50 - baseline,
        added_p99=p99 - baseline,
        added_max=max(through) - baseline,
        loop=watched,
    )


# Memory


async def measure_idle_sessions(bench: GatewayBench) -> None:
    plan = bench.plan
    bench.progress(f"{plan.sessions:,} open sessions")
    polar = await bench.servers.start_polar("polar-idle")  # a fresh one: what others left behind is not counted
    assert polar.server is not None
    before = polar.server.read_memory_bytes()
    keys = await polar.create_keys(plan.sessions)
    numbered = enumerate(keys)
    connections: list[Connection] = []

    async def caller() -> None:
        for number, key in numbered:
            connection = await Connection.open(polar.port)
            connections.append(connection)
            size = S if number < plan.large_sessions else calls.SMALL
            check_answer(await connection.call(polar.open_session(key).make_request(size, 5)))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    await asyncio.sleep(plan.settle_seconds)
    connected = polar.server.read_memory_bytes()
    for connection in connections:
        connection.close()
    await asyncio.sleep(plan.settle_seconds)
    bench.report.memory = SessionMemory(
        plan.sessions, plan.large_sessions, before, connected, polar.server.read_memory_bytes()
    )


Measurement = Callable[[GatewayBench], Awaitable[None]]

MEASUREMENTS: tuple[Measurement, ...] = (
    measure_cpu_per_call,
    measure_dialect_cpu,
    measure_added_latency,
    measure_many_streams,
    measure_idle_sessions,
)


def _compute_percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


# The command


_LITELLM_ENVIRONMENT = Path(".cache/bench-litellm")


@click.command("gateway")
@click.option("--quick", is_flag=True, help="Run fewer rounds: a minute and a half instead of four.")
@click.option(
    "--litellm",
    "environment",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Use the LiteLLM of this virtual environment [default: {_LITELLM_ENVIRONMENT}, made if it is not there].",
)
@click.option("--no-litellm", is_flag=True, help="Leave LiteLLM out.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measure another checkout of Polar in the same run, with this one's dependencies.",
)
@click.option("--cpu-only", is_flag=True, help="Measure CPU per call only: no latencies, streams or idle sessions.")
@json_option
def command(
    quick: bool, environment: Path | None, no_litellm: bool, against: Path | None, cpu_only: bool, as_json: bool
) -> None:
    """Measure CPU per captured call, added latency, many streams and idle sessions."""
    where = None if no_litellm else environment or _install_litellm()
    plan = QUICK if quick else GatewayPlan()
    measurements = (measure_cpu_per_call,) if cpu_only else MEASUREMENTS
    measured = run_async(run(plan, where, make_progress_printer(), against=against, measurements=measurements))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())


def _install_litellm() -> Path:
    if find_litellm(_LITELLM_ENVIRONMENT) is None:
        with Console(stderr=True).status(f"installing LiteLLM {LITELLM_VERSION} into {_LITELLM_ENVIRONMENT}"):
            install_litellm(_LITELLM_ENVIRONMENT)
    return _LITELLM_ENVIRONMENT

"""What `make bench-gateway` measured, whether it reaches what is promised, and how it is shown."""

from collections.abc import Iterator

import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.gateway.load import FASTAPI, LITELLM, POLAR, Cost
from benchmarks.polar_server import LoopReport
from benchmarks.report import MB, Promise, describe_machine, make_promise_table


class AddedLatency(Struct):
    """Latency to the first byte that a server adds to the engine's own, in milliseconds."""

    server: str
    size: str
    stream: bool
    calls: int
    direct_p50: float
    p50: float
    p99: float


class StreamDelays(Struct):
    """Many streams at once through Polar. Delays are milliseconds per token, less the median of streams that went
    straight to the engine at the same time."""

    streams: int
    tokens: int
    seconds: float
    cpu_per_token_us: float
    core_busy: float  # of one core, 0 to 1
    direct_p50: float
    added_p50: float
    added_p99: float
    added_max: float
    loop: LoopReport


class SessionMemory(Struct):
    """Resident bytes of Polar's process: before, with all sessions and a connection of each, with sessions only."""

    sessions: int
    large_sessions: int
    before: int
    connected: int
    idle: int


class GatewayReport(Struct):
    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)  # by size, then server
    dialects: dict[str, Cost] = field(default_factory=dict)
    added: list[AddedLatency] = field(default_factory=list)
    streams: StreamDelays | None = None
    memory: SessionMemory | None = None


def list_promises(report: GatewayReport) -> list[Promise]:
    return [
        *_list_cost_promises(report),
        *_list_latency_promises(report),
        *_list_stream_promises(report),
        *_list_memory_promises(report),
    ]


def _list_cost_promises(report: GatewayReport) -> Iterator[Promise]:
    for size, costs in report.costs.items():
        for peer, share in ((LITELLM, 40), (FASTAPI, 5)):
            if peer in costs:
                ratio = costs[peer].cpu_ms / costs[POLAR].cpu_ms
                what = f"CPU per captured call against {peer}, {size}"
                yield Promise(what, f"at most 1/{share}", f"1/{ratio:.1f}", ratio >= share)


def _list_latency_promises(report: GatewayReport) -> Iterator[Promise]:
    for added in report.added:
        if added.server == POLAR:
            what = f"added latency to the first byte, p50, {added.size} {_describe_form(added.stream)}"
            yield Promise(what, "under 1 ms", f"{added.p50:.2f} ms", added.p50 < 1)


def _list_stream_promises(report: GatewayReport) -> Iterator[Promise]:
    if (streams := report.streams) is not None:
        what = f"{streams.streams} streams of 10 tokens a second"
        measured = f"{streams.added_p99:.1f} ms"
        yield Promise(f"{what}: added delay per token, p99", "at most 50 ms", measured, streams.added_p99 <= 50)
        longest = f"{len(streams.loop.stalls)}, longest {streams.loop.late_max:.1f} ms"
        yield Promise(f"{what}: stalls of the event loop over 10 ms", "none", longest, not streams.loop.stalls)


def _list_memory_promises(report: GatewayReport) -> Iterator[Promise]:
    if (memory := report.memory) is not None and memory.sessions >= 10_000:
        measured = f"{memory.connected / MB:.0f} MB"
        what = f"memory with {memory.sessions:,} open idle sessions"
        yield Promise(what, "under 500 MB", measured, memory.connected < 500 * MB)


def to_json(report: GatewayReport) -> bytes:
    costs = {size: {name: _describe_cost(cost) for name, cost in found.items()} for size, found in report.costs.items()}
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "cpu_per_call": costs,
            "dialects": {name: _describe_cost(cost) for name, cost in report.dialects.items()},
            "first_byte": report.added,
            "streams": report.streams,
            "memory": report.memory,
            "promises": list_promises(report),
        }
    )


def _describe_cost(cost: Cost) -> dict[str, float]:
    return {"calls": cost.calls, "cpu_ms": cost.cpu_ms, "calls_per_second": cost.per_second}


def print_report(report: GatewayReport, console: Console) -> None:
    for table in (
        _make_cost_table(report),
        _make_dialect_table(report),
        _make_latency_table(report),
        _make_stream_table(report),
        _make_memory_table(report),
        make_promise_table(list_promises(report)),
    ):
        if table.row_count:
            console.print(table)


def _make_cost_table(report: GatewayReport) -> Table:
    table = _make_table(
        "CPU per call and throughput on one core", "call", "server", "CPU ms", "of Polar's", "calls a second", "calls"
    )
    for size, costs in report.costs.items():
        own = costs[POLAR].cpu_ms
        for name, cost in sorted(costs.items(), key=lambda item: item[1].cpu_ms):
            ratio = f"{cost.cpu_ms / own:.2f} x"
            table.add_row(size, name, f"{cost.cpu_ms:.2f}", ratio, f"{cost.per_second:.0f}", str(cost.calls))
        table.add_section()
    return table


def _make_dialect_table(report: GatewayReport) -> Table:
    table = _make_table("Polar's dialects, S", "dialect", "CPU ms", "calls a second", "calls")
    for name, cost in report.dialects.items():
        table.add_row(name, f"{cost.cpu_ms:.2f}", f"{cost.per_second:.0f}", str(cost.calls))
    return table


def _make_latency_table(report: GatewayReport) -> Table:
    title = "Added latency to the first byte, one caller (ms)"
    table = _make_table(title, "call", "reply", "server", "engine alone, p50", "added p50", "added p99", "calls")
    for row in report.added:
        figures = (f"{row.direct_p50:.2f}", f"{row.p50:.2f}", f"{row.p99:.2f}", str(row.calls))
        table.add_row(row.size, _describe_form(row.stream), row.server, *figures)
    return table


def _make_stream_table(report: GatewayReport) -> Table:
    table = _make_table("Many streams through Polar on one core", "", "")
    if (found := report.streams) is None:
        return table
    loop = found.loop
    table.add_row("streams, tokens", f"{found.streams}, {found.tokens:,}")
    table.add_row(
        "added delay per token, p50 / p99 / max (ms)", _format_values(found.added_p50, found.added_p99, found.added_max)
    )
    table.add_row("engine alone, p50 (ms)", f"{found.direct_p50:.2f}")
    table.add_row("CPU per token (µs), share of the core", f"{found.cpu_per_token_us:.0f}, {found.core_busy:.0%}")
    table.add_row("event loop late, p50 / p99 / max (ms)", _format_values(loop.late_p50, loop.late_p99, loop.late_max))
    busy = sum(stall.process_cpu >= stall.late / 2 for stall in loop.stalls)
    table.add_row(
        "stalls over 10 ms, of which by its own work (else the core was taken)", f"{len(loop.stalls)}, {busy}"
    )
    table.add_row(
        "garbage collections, total / longest (ms)", f"{loop.collections}, {loop.gc_total:.0f} / {loop.gc_max:.1f}"
    )
    return table


def _make_memory_table(report: GatewayReport) -> Table:
    table = _make_table("Polar's memory (MB)", "", "resident")
    if (found := report.memory) is None:
        return table
    table.add_row("before", f"{found.before / MB:.0f}")
    table.add_row(
        f"{found.sessions:,} sessions after a call each ({found.large_sessions} of them S), connected",
        f"{found.connected / MB:.0f}",
    )
    table.add_row("the same, connections closed", f"{found.idle / MB:.0f}")
    return table


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "call", "server", "reply", "dialect") else "right")
    return table


def _format_values(*values: float) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _describe_form(stream: bool) -> str:
    return "streamed" if stream else "whole"

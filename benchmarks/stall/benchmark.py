"""`make bench-stall`: what a caller with the longest bodies costs everybody else.

    attacker (process) ─► gateway (process) ─► engine (process, answers at once)
    innocent caller, /health, a node's heartbeats: from here

Idle times and attacks take turns in short rounds, so that whatever else the machine does hits all of them alike. An
innocent call and /health must stay within 50 ms of idle (99th percentile), and no node may be lost.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError, Connection, encode_get, encode_post, get_port
from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer, tokenizer_option
from benchmarks.polar_server import GatewayAddresses
from benchmarks.process import ServerProcess, run_async
from benchmarks.stall.attack import KINDS, StatusCounts
from polar.engines.scripted import TOKENIZER_FOLDER
from polar.errors import PolarError

ALLOWED_MS = 50.0
IDLE = "idle"
_PAUSE = 0.01  # seconds between two innocent calls
_MODULE = (sys.executable, "-m")


class StallPlan(Struct, frozen=True):
    rounds: int = 4
    seconds: float = 4.0  # of each attack in a round, and of each idle time
    tokenizer: str = str(TOKENIZER_FOLDER)
    kinds: tuple[str, ...] = KINDS


QUICK = StallPlan(rounds=1, seconds=3.0)


class Latencies(Struct):
    """Milliseconds, while something went on."""

    calls: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)  # of the attacker's own calls


class StallReport(Struct):
    by_kind: dict[str, Latencies] = field(default_factory=dict)
    leases_lost: int = 0
    beats: int = 0

    def within(self, kind: str) -> bool:
        idle, found = self.by_kind[IDLE], self.by_kind[kind]
        return (
            percentile(found.calls, 99) - percentile(idle.calls, 99) <= ALLOWED_MS
            and percentile(found.health, 99) - percentile(idle.health, 99) <= ALLOWED_MS
        )

    @property
    def passed(self) -> bool:
        return not self.leases_lost and all(self.within(kind) for kind in self.by_kind)


class _Created(Struct):
    api_key: str


class _Held(Struct):
    work_id: int
    fence: int


class _Engines(Struct):
    generation: int


class _Orders(Struct):
    lost: list[_Held] = field(default_factory=list)
    engines: _Engines | None = None


async def run(plan: StallPlan, progress: Progress) -> StallReport:
    report = StallReport()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-stall-")))

        async def start(name: str, *argv: str) -> ServerProcess:
            server = ServerProcess([*_MODULE, *argv], None, folder / f"{name}.log", speaks=True)
            return await stack.enter_async_context(server)

        engine = await start("engine", "benchmarks.stall.engine", plan.tokenizer)
        engine_url = await engine.read_message(str)
        gateway = await start("gateway", "benchmarks.polar_server", engine_url, str(folder / "data"), plan.tokenizer)
        addresses = await gateway.read_message(GatewayAddresses)
        port, control = get_port(addresses.gateway), get_port(addresses.control)
        keys = [await _create_session(control) for _ in range(2)]
        attacker = await start("attacker", "benchmarks.stall.attack", str(port), keys[0])
        progress("starting the processes that render")
        for size in (100_000, 2_000_000):
            await _warm_up(port, keys[0], size)
        beating = asyncio.create_task(_hold_a_lease(control, report))
        stack.callback(beating.cancel)
        for number in range(plan.rounds):
            for kind in _alternate_with_idle(plan.kinds):
                progress(f"round {number + 1} of {plan.rounds}: {kind}")
                found = report.by_kind.setdefault(kind, Latencies())
                if kind != IDLE:
                    attacker.send_line(kind)
                await _measure(plan.seconds, port, control, keys[1], found)
                if kind != IDLE:
                    attacker.send_line("")
                    for status, count in (await attacker.read_message(StatusCounts, timeout=180)).statuses.items():
                        found.statuses[status] = found.statuses.get(status, 0) + count
                    await asyncio.sleep(1)  # what the attacker left unfinished ends
        if beating.done():
            beating.result()  # raises
    return report


def _alternate_with_idle(kinds: tuple[str, ...]) -> Iterator[str]:
    for kind in kinds:
        yield IDLE
        yield kind


async def _create_session(control: int) -> str:
    connection = await Connection.open(control)
    answer = await connection.call(encode_post("/sessions", b"{}"))
    connection.close()
    return msgspec.json.decode(answer.read_content(), type=_Created).api_key


async def _warm_up(port: int, key: str, size: int) -> None:
    """A prompt of so many bytes, so that who makes such prompts has started."""
    connection = await Connection.open(port)
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": f"a{' ' * size}b"}]})
    await connection.call(encode_post("/v1/chat/completions", body, key))
    connection.close()


async def _measure(seconds: float, port: int, control: int, key: str, found: Latencies) -> None:
    end = time.monotonic() + seconds

    async def repeat(port: int, make: Callable[[int], bytes], into: list[float]) -> None:
        connection = await Connection.open(port)
        number = 0
        while time.monotonic() < end:
            number += 1
            answer = await connection.call(make(number))
            into.append((answer.ended_at - answer.sent_at) * 1e3)
            await asyncio.sleep(_PAUSE)
        connection.close()

    def call(number: int) -> bytes:
        text = f"{number} {time.monotonic_ns()} " + "Make the failing tests pass. " * 30
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]})
        return encode_post("/v1/chat/completions", body, key)

    await asyncio.gather(
        repeat(port, call, found.calls), repeat(control, lambda _: encode_get("/health"), found.health)
    )


async def _hold_a_lease(control: int, report: StallReport) -> None:
    """A node that has leased a session and shows that it lives. A server that did not hear of it takes the lease."""
    connection = await Connection.open(control)

    async def call(path: str, **fields: object) -> bytes:
        return (await connection.call(encode_post(path, msgspec.json.encode(fields)))).read_content()

    await call("/rollout/task/submit", task_id="stall", instruction="none", runtime={"backend": "local"})
    await call("/nodes/join", node_id="stall", name="stall", backends=["local"], slots=1, store="", replaces=[])
    leases = msgspec.json.decode(await call("/nodes/stall/lease", holding=[], room=1), type=list[_Held])
    if len(leases) != 1:
        raise BenchmarkError("The server gave no lease.")
    seen = -1
    while True:
        try:
            beat = await call("/nodes/stall/beat", holding=leases, seen=seen, applied=seen)
            orders = msgspec.json.decode(beat, type=_Orders)
            seen = seen if orders.engines is None else orders.engines.generation
            report.leases_lost += len(orders.lost)
            report.beats += 1
        except BenchmarkError:  # it does not know us any more
            report.leases_lost += 1
            return


def percentile(values: list[float], percent: int) -> float:
    if not values:
        raise PolarError("Nothing was measured.")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def print_report(report: StallReport, console: Console) -> None:
    table = Table(title="An innocent call and /health beside one caller (milliseconds)", title_justify="left")
    for name in ("the caller sends", "calls", "call p50", "p99", "over idle", "/health p50", "p99", "over idle", ""):
        table.add_column(name, justify="left" if name in ("the caller sends", "") else "right")
    table.add_column("the caller got")
    idle = report.by_kind[IDLE]
    for kind, found in report.by_kind.items():
        cells = []
        for values, base in ((found.calls, idle.calls), (found.health, idle.health)):
            p99 = percentile(values, 99)
            cells += [f"{percentile(values, 50):.1f}", f"{p99:.1f}", f"{p99 - percentile(base, 99):+.1f}"]
        got = ", ".join(f"{status or 'cut'}: {count}" for status, count in sorted(found.statuses.items()))
        verdict = "" if kind == IDLE else "ok" if report.within(kind) else "FAILS"
        table.add_row(kind, str(len(found.calls)), *cells, verdict, got)
    console.print(table)
    console.print(f"{report.beats} heartbeats of a node with a lease, {report.leases_lost} leases lost.")
    console.print("passed" if report.passed else "failed", f"(at most {ALLOWED_MS:g} ms over idle, p99)")


# The command


@click.command("stall")
@click.option("--quick", is_flag=True, help="Run one round: a minute and a half instead of six.")
@click.option("--only", "kinds", multiple=True, help="Measure only the kinds of bodies that begin so; may be repeated.")
@tokenizer_option
@json_option
def command(quick: bool, kinds: tuple[str, ...], tokenizer: Path | None, as_json: bool) -> None:
    """Measure what a caller with the longest allowed bodies costs other callers, /health and nodes.

    Exit with status 1 where an innocent call or /health is more than 50 ms slower than idle (p99), or a node is lost.
    """
    plan = QUICK if quick else StallPlan()
    if tokenizer is not None:
        plan = msgspec.structs.replace(plan, tokenizer=str(tokenizer))
    if kinds:
        plan = msgspec.structs.replace(plan, kinds=tuple(kind for kind in plan.kinds if kind.startswith(kinds)))
    measured = run_async(run(plan, make_progress_printer()))
    if as_json:
        click.echo(msgspec.json.encode(measured))
    else:
        print_report(measured, make_console(150))
    if not measured.passed:
        raise SystemExit(1)

"""`make bench-vllm`: tokens a second of a vLLM server through a capturing gateway, and without it.

    load (processes) ─┬─ gateway (process: ids to the engine, every call captured) ─┐
                      ├─ the engine's own chat API, with log-probabilities ──────────┼─► engine
                      └─ ids straight to the engine, with log-probabilities ─────────┘

The three ways take turns: in a round, each level (sessions at once) is measured once by every way, and the order of the
ways moves on from round to round. Sessions are as agents hold them: each turn sends the history and something new.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.polar_server import GatewayAddresses
from benchmarks.process import ServerProcess, run_async
from benchmarks.report import Promise, describe_machine, print_promises
from benchmarks.tax.load import StoredExchange, read_exchanges
from benchmarks.vllm.load import LoadJob, LoadTally, SessionShape, WayName
from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError

GATEWAY: WayName = "gateway"
CHAT: WayName = "chat"
IDS: WayName = "ids"
WAYS = (CHAT, GATEWAY, IDS)
_START_SECONDS = 120
_PREPARE_SECONDS = 300
_ROUND_SECONDS = 3_600
_ENDS_AT_ONCE = 16
_GROWTH = 0.75
"""Exponent with which a level's time grows with its sessions: an engine samples more of them at once."""


class VllmPlan(Struct, frozen=True):
    levels: tuple[int, ...] = (16, 128, 256, 512)  # sessions at once
    rounds: int = 2
    shape: SessionShape = SessionShape()
    clients: int = 4  # processes that make the load
    kept: int = 4  # sessions of each round whose capture is checked and whose ids are reported
    seconds: float | None = None  # of the whole run: what would take it beyond is left out


QUICK = VllmPlan(
    levels=(2, 8), rounds=1, shape=SessionShape(turns=3, least_tokens=24, most_tokens=32), clients=2, kept=2
)


class RoundMeasurement(Struct):
    """One way at one level in one round."""

    way: WayName
    sessions: int
    seconds: float
    tally: LoadTally
    gateway_cpu: float = 0.0  # seconds that the gateway's process took
    not_whole: int = 0  # captured calls, of those that were looked at, that are not trainable from recorded ids

    @property
    def rate(self) -> float:
        return self.tally.tokens / self.seconds

    @property
    def summary(self) -> str:
        line = f"{self.sessions} sessions, {self.way}: {self.rate:,.0f} tokens/s, {self.tally.errors} errors"
        return f"{line} ({self.tally.first_errors[0]})" if self.tally.first_errors else line


class VllmReport(Struct):
    plan: VllmPlan
    model: str = ""
    measured: list[RoundMeasurement] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)  # some of the gateway's sessions, for `polar verify`
    left_out: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every call was answered, and every captured one that was looked at is whole."""
        return not any(it.tally.errors or it.not_whole for it in self.measured)

    def find_rounds(self, way: WayName, sessions: int) -> list[RoundMeasurement]:
        return [it for it in self.measured if it.way == way and it.sessions == sessions]


async def run(
    plan: VllmPlan,
    url: str,
    progress: Progress,
    *,
    tokenizer: str | None = None,
    data: Path | None = None,
    keep: Callable[[VllmReport], None] = lambda _: None,
) -> VllmReport:
    """`data`: where the gateway keeps what it captures [default: a folder that is deleted]. `keep` gets the report
    after every measurement."""
    started_at = time.monotonic()
    model, folder = await inspect_engine(url, tokenizer)
    report = VllmReport(plan, model)
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-bench-")))
        job = LoadJob(CHAT, url.rstrip("/"), model, folder, plan.shape, first=0, sessions=0)
        bench = await Bench.start(stack, plan, job, data or scratch / "data", scratch)
        progress("warming up")
        warm = min(8, min(plan.levels))
        for way in WAYS:
            progress((await bench.measure(way, warm))[0].summary)
        for number in range(plan.rounds):
            order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            for level in plan.levels:
                left = None if plan.seconds is None else plan.seconds - (time.monotonic() - started_at)
                if left is not None and estimate_seconds(report, level) > left:
                    report.left_out.append(f"round {number + 1} of {level} sessions: too little time was left")
                    continue
                for way in order:
                    measured, captured = await bench.measure(way, level)
                    report.measured.append(measured)
                    report.captured += captured
                    progress(f"round {number + 1}, {measured.summary}")
                    keep(report)
    return report


def estimate_seconds(report: VllmReport, level: int) -> float:
    """What all ways will take at a level: as they did there, or at the nearest level."""
    known = {it.sessions for it in report.measured}
    if not known:
        return 0.0
    nearest = min(known, key=lambda sessions: abs(sessions - level))
    ways = (report.find_rounds(way, nearest) for way in WAYS)
    seconds = sum(max((it.seconds for it in measured), default=0.0) for measured in ways)
    growth: float = (level / nearest) ** _GROWTH
    return seconds * growth


async def inspect_engine(url: str, tokenizer: str | None) -> tuple[str, str]:
    """The model's name, and where its tokenizer lies."""
    engine = VllmEngine(url, EngineSettings(kind="vllm", tokenizer=tokenizer))
    try:
        await engine.start()
        folder = engine.find_tokenizer_folder()
    finally:
        await engine.close()
    if folder is None:
        raise ConfigError(f"{url} does not say where its model lies on this machine: name it with --tokenizer DIR.")
    assert engine.model is not None
    return engine.model, folder


class Bench:
    """The gateway and the load's processes."""

    def __init__(
        self,
        plan: VllmPlan,
        job: LoadJob,
        gateway: ServerProcess,
        addresses: GatewayAddresses,
        client: AsyncClient,
        loads: list[ServerProcess],
    ) -> None:
        """`job` has what all jobs have in common."""
        self._plan = plan
        self._job = job
        self._gateway = gateway
        self._addresses = addresses
        self.client = client
        self._loads = loads
        self._begun = 0  # sessions so far: no two have the same number, so none finds another one's turns cached

    @classmethod
    async def start(
        cls, stack: contextlib.AsyncExitStack, plan: VllmPlan, job: LoadJob, data: Path, scratch: Path
    ) -> "Bench":
        async def start(name: str, *argv: str) -> ServerProcess:
            server = ServerProcess([sys.executable, "-m", *argv], None, scratch / f"{name}.log", speaks=True)
            return await stack.enter_async_context(server)

        gateway = await start("gateway", "benchmarks.polar_server", job.url, str(data), job.tokenizer)
        loads = [await start(f"load-{number}", "benchmarks.vllm.load") for number in range(plan.clients)]
        addresses = await gateway.read_message(GatewayAddresses, _START_SECONDS)
        client = await stack.enter_async_context(AsyncClient(addresses.control))
        return cls(plan, job, gateway, addresses, client, loads)

    @property
    def control_url(self) -> str:
        return self._addresses.control

    async def measure(self, way: WayName, sessions: int) -> tuple[RoundMeasurement, list[str]]:
        """With the ids of some sessions that the gateway captured."""
        opened = [await self.client.new_session() for _ in range(sessions)] if way == GATEWAY else []
        await asyncio.gather(*(self._prepare(number, way, sessions, opened) for number in range(len(self._loads))))
        self._begun += sessions
        cpu, started_at = self._gateway.read_cpu_seconds(), time.monotonic()
        for load in self._loads:
            load.send_line("go")
        tally = LoadTally()
        for part in await asyncio.gather(*(load.read_message(LoadTally, _ROUND_SECONDS) for load in self._loads)):
            tally.add(part)
        measured = RoundMeasurement(way, sessions, time.monotonic() - started_at, tally)
        captured: list[str] = []
        if way == GATEWAY:
            measured.gateway_cpu = self._gateway.read_cpu_seconds() - cpu
            step = max(1, sessions // self._plan.kept)
            captured = [session["session_id"] for session in opened[::step]][: self._plan.kept]
            measured.not_whole = await self._count_not_whole(captured)
            await self._end_sessions([session["session_id"] for session in opened])
        return measured, captured

    async def _prepare(self, number: int, way: WayName, sessions: int, opened: list[dict[str, str]]) -> None:
        """Gives a process its share of the sessions."""
        start, stop = (sessions * share // len(self._loads) for share in (number, number + 1))
        job = msgspec.structs.replace(
            self._job,
            way=way,
            url=self._addresses.gateway if way == GATEWAY else self._job.url,
            first=self._begun + start,
            sessions=stop - start,
            keys=[session["api_key"] for session in opened[start:stop]],
        )
        self._loads[number].send_line(msgspec.json.encode(job).decode())
        await self._loads[number].read_message(bool, _PREPARE_SECONDS)

    async def _count_not_whole(self, session_ids: list[str]) -> int:
        async with aiohttp.ClientSession() as http:
            sessions = [await read_exchanges(http, self._addresses.control, name) for name in session_ids]
        return sum(count_incomplete_calls(exchanges, self._plan.shape.turns) for exchanges in sessions)

    async def _end_sessions(self, session_ids: list[str]) -> None:
        gate = asyncio.Semaphore(_ENDS_AT_ONCE)

        async def end(session_id: str) -> None:
            async with gate:
                await self.client.end_session(session_id)

        await asyncio.gather(*(end(session_id) for session_id in session_ids))


def count_incomplete_calls(exchanges: list[StoredExchange], turns: int) -> int:
    """Calls of a session that are missing, not trainable, or not continued from the recorded ids."""
    return (
        abs(turns - len(exchanges))
        + sum(not exchange.is_whole for exchange in exchanges)
        + sum(exchange.continuation != "recorded" for exchange in exchanges[1:])
    )


# Promises and tables

PROMISED: dict[WayName, float] = {CHAT: 1.0, IDS: 0.95}
"""Tokens a second through the gateway against another way's, at every level."""
_TITLES = {CHAT: "the engine's chat API", GATEWAY: "through Polar, captured", IDS: "ids straight to the engine"}


def compute_ratios(report: VllmReport, against: WayName, level: int) -> list[float]:
    """Round by round: what else the machine does changes slowly."""
    pairs = zip(
        report.find_rounds(GATEWAY, level), report.find_rounds(against, level), strict=False
    )  # a run may end within a round
    return [gateway.rate / other.rate for gateway, other in pairs if other.tally.tokens]


def list_promises(report: VllmReport) -> list[Promise]:
    found = []
    for level in report.plan.levels:
        for against, least in PROMISED.items():
            if all_of_them := compute_ratios(report, against, level):
                kept = median(all_of_them)
                measured = f"{kept:.3f} (rounds: {min(all_of_them):.3f} to {max(all_of_them):.3f})"
                what = f"{level} sessions, against {_TITLES[against]}"
                found.append(Promise(what, f"at least {least}", measured, kept >= least))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def to_json(report: VllmReport) -> bytes:
    rounds = [_describe_round(it) for it in report.measured]
    found = {
        str(level): {against: compute_ratios(report, against, level) for against in PROMISED}
        for level in report.plan.levels
    }
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "plan": report.plan,
            "model": report.model,
            "rounds": rounds,
            "ratios": found,
            "promises": list_promises(report),
            "captured": report.captured,
            "left_out": report.left_out,
        }
    )


def _describe_round(it: RoundMeasurement) -> dict[str, Any]:
    tally = msgspec.structs.asdict(it.tally)
    times = tally.pop("first_token_ms")
    return {
        "way": it.way,
        "sessions": it.sessions,
        "seconds": it.seconds,
        "tokens_per_second": it.rate,
        "first_token_p50_ms": percentile(times, 0.5),
        "first_token_p99_ms": percentile(times, 0.99),
        "gateway_cpu": it.gateway_cpu,
        "not_whole": it.not_whole,
        **tally,
    }


def print_report(report: VllmReport, console: Console) -> None:
    shape = report.plan.shape
    title = (
        f"{report.model}: sessions of {shape.turns} turns, {shape.least_tokens} to {shape.most_tokens} sampled tokens "
        f"each, {shape.shared_words:,} shared words, {shape.message_words} new words a turn"
    )
    table = Table(title=title, title_justify="left")
    first = "first token" if shape.stream else "reply"
    table.add_column("sessions", justify="right")
    table.add_column("")
    for column in (
        "tokens/s",
        "by round",
        "Polar / it",
        f"{first} p50, ms",
        "p99, ms",
        "prompt tokens",
        "errors",
        "gateway's cores",
    ):
        table.add_column(column, justify="right")
    for level in report.plan.levels:
        for row in _iterate_rows(report, level):
            table.add_row(*row)
        table.add_section()
    console.print(table)
    for line in report.left_out:
        console.print(f"Left out: {line}.", highlight=False)
    if broken := sum(it.not_whole for it in report.measured):
        console.print(f"[red]{broken} captured calls are not whole[/]", highlight=False)
    print_promises(list_promises(report), console)


def _iterate_rows(report: VllmReport, level: int) -> Iterator[tuple[str, ...]]:
    for way in WAYS:
        measured = report.find_rounds(way, level)
        if not measured:
            continue
        tokens, seconds = sum(it.tally.tokens for it in measured), sum(it.seconds for it in measured)
        times = [ms for it in measured for ms in it.tally.first_token_ms]
        against = compute_ratios(report, way, level) if way != GATEWAY else []
        yield (
            str(level),
            _TITLES[way],
            f"{tokens / seconds:,.0f}",
            " ".join(f"{it.rate:,.0f}" for it in measured),
            f"{median(against):.3f}" if against else "",
            f"{percentile(times, 0.5):,.0f}",
            f"{percentile(times, 0.99):,.0f}",
            f"{sum(it.tally.prompt_tokens for it in measured):,}",
            str(sum(it.tally.errors for it in measured)),
            f"{sum(it.gateway_cpu for it in measured) / seconds:.2f}" if way == GATEWAY else "",
        )


# The command


@click.command("vllm")
@click.argument("url")
@click.option(
    "--level",
    "levels",
    type=click.IntRange(min=1),
    multiple=True,
    help="Hold so many sessions at once; may be repeated.",
)
@click.option("--turns", type=click.IntRange(min=1), help="Take this many turns in a session.")
@click.option("--rounds", type=click.IntRange(min=1), help="Measure every level and way this many times.")
@click.option("--clients", type=click.IntRange(min=1), help="Make the load with this many processes.")
@click.option("--seconds", type=float, help="Leave out the rounds that would take the whole run beyond this.")
@click.option("--whole", is_flag=True, help="Ask for whole replies instead of streams.")
@click.option("--quick", is_flag=True, help="Hold few and short sessions, for a look.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Use the tokenizer and chat template in this folder [default: where the server has its model from].",
)
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), help="Keep what is captured here, for `polar verify`."
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a JSON file, anew after each measurement."
)
@json_option
def command(
    url: str,
    levels: tuple[int, ...],
    whole: bool,
    quick: bool,
    tokenizer: Path | None,
    data: Path | None,
    output: Path | None,
    as_json: bool,
    turns: int | None,
    **sizes: float | None,
) -> None:
    """Measure tokens a second of the vLLM server at URL: through a capturing gateway, its chat API, and with ids.

    Exit with status 1 where a call failed, or where one that was captured can't be trained on.
    """
    plan = QUICK if quick else VllmPlan()
    shape = msgspec.structs.replace(plan.shape, stream=not whole, turns=turns or plan.shape.turns)
    given = {name: size for name, size in sizes.items() if size is not None}
    plan = msgspec.structs.replace(plan, levels=levels or plan.levels, shape=shape, **given)

    def keep(report: VllmReport) -> None:
        if output is not None:
            output.write_bytes(to_json(report))

    folder = None if tokenizer is None else str(tokenizer)
    measured = run_async(run(plan, url, make_progress_printer(), tokenizer=folder, data=data, keep=keep))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console(150))
    if not measured.passed:
        raise SystemExit(1)

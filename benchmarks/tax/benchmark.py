"""`make bench-tax`: tokens a second of an engine whose calls Polar captures, against those of the engine alone.

Three ways take turns in short rounds: straight to the engine, the same with log-probabilities, and through a gateway
that stores everything. The engine and the gateway are processes of their own; what the gateway takes from the engine's
CPUs is part of the tax, and so are log-probabilities, which nobody needs who does not train.
"""

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError
from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.polar_server import GatewayAddresses
from benchmarks.process import ServerProcess, run_async
from benchmarks.report import Promise, describe_machine, print_promises
from benchmarks.tax.load import (
    QUICK,
    CapturedClient,
    ConversationClient,
    DirectClient,
    RoundTotals,
    StoredExchange,
    TaxPlan,
    measure,
)
from polar.client.async_client import AsyncClient
from polar.config import EngineSettings
from polar.plugins import load

OFF, LOGPROBS, ON = "engine alone", "with log-probabilities", "captured"


class TaxReport(Struct):
    plan: TaxPlan
    engines: dict[str, dict[str, RoundTotals]] = field(default_factory=dict)  # by kind, then by way


async def run(plan: TaxPlan, embedded: EngineSettings | None, vllm: str | None, progress: Progress) -> TaxReport:
    """Of the embedded engine, started with these settings, and of the vLLM at this address, where they are named."""
    report = TaxReport(plan)
    if embedded is not None:
        progress("starting the embedded engine")
        launched = await load("engines", embedded.kind).launch(embedded)
        try:
            report.engines[embedded.kind] = await _measure_ways(
                launched.url, plan, lambda it: progress(f"embedded: {it}")
            )
        finally:
            await launched.stop()
    if vllm is not None:
        report.engines["vllm"] = await _measure_ways(vllm, plan, lambda it: progress(f"vllm: {it}"))
    return report


async def _measure_ways(engine_url: str, plan: TaxPlan, progress: Progress) -> dict[str, RoundTotals]:
    measured = {OFF: RoundTotals(), LOGPROBS: RoundTotals(), ON: RoundTotals()}
    async with (
        start_gateway(engine_url) as (server, addresses),
        AsyncClient(addresses.control) as client,
        open_connections() as http,
    ):
        captured = CapturedClient(addresses.gateway, client, http)
        progress("first conversations")
        begun = 0
        await measure(captured, plan, begun, RoundTotals())
        between = find_between(await captured.stored(addresses.control))
        alone = DirectClient(engine_url, between, logprobs=False)
        with_logprobs = DirectClient(engine_url, between, logprobs=True)
        ways: dict[str, ConversationClient] = {OFF: alone, LOGPROBS: with_logprobs, ON: captured}
        try:
            for number in range(plan.rounds):
                # There and back: what the machine does meanwhile hits all of them alike.
                for name in list(ways)[:: -1 if number % 2 else 1]:
                    begun += plan.conversations
                    progress(f"{name}, round {number + 1} of {plan.rounds}")
                    cpu = server.read_cpu_seconds()
                    await measure(ways[name], plan, begun, measured[name])
                    measured[name].gateway_cpu += server.read_cpu_seconds() - cpu
                check_capture(await captured.stored(addresses.control), plan)
        finally:
            await alone.close()
            await with_logprobs.close()
    return measured


@contextlib.asynccontextmanager
async def start_gateway(engine_url: str) -> AsyncIterator[tuple[ServerProcess, GatewayAddresses]]:
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as folder:
        argv = [sys.executable, "-m", "benchmarks.polar_server", engine_url, str(Path(folder) / "data")]
        async with ServerProcess(argv, None, Path(folder) / "log", speaks=True) as server:
            yield server, await server.read_message(GatewayAddresses)


def open_connections() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def find_between(sessions: list[list[StoredExchange]]) -> list[int]:
    """The ids that a gateway puts between a turn that was sampled and the next one."""
    for first, second, *_ in sessions:
        if first.prompt_ids and first.sampled_ids and second.prompt_ids:
            return second.prompt_ids[len(first.prompt_ids) + len(first.sampled_ids) :]
    raise BenchmarkError("Polar captured no token ids: does the engine tell where its model's folder is?")


def check_capture(sessions: list[list[StoredExchange]], plan: TaxPlan) -> None:
    """The figures are those of a gateway that kept everything, or there are none."""
    for exchanges in sessions:
        if len(exchanges) != plan.turns:
            raise BenchmarkError(f"Polar stored {len(exchanges)} of {plan.turns} calls.")
        for turn, exchange in enumerate(exchanges):
            if not exchange.is_whole or (turn and exchange.continuation != "recorded"):
                raise BenchmarkError(
                    f"Polar did not capture a call whole: {exchange.untrainable}, {exchange.continuation}."
                )


# Promises and tables


def compute_ratios(report: TaxReport, kind: str, way: str = ON) -> list[float]:
    """Tokens a second against those of the engine alone, round by round: what else the machine does changes slowly."""
    ways = report.engines[kind]
    return [rate / alone for rate, alone in zip(ways[way].rates, ways[OFF].rates, strict=True)]


def compute_ratio(report: TaxReport, kind: str, way: str = ON) -> float:
    return median(compute_ratios(report, kind, way))


def list_promises(report: TaxReport) -> list[Promise]:
    """Of engines that are ours. What others make of log-probabilities is not for us to promise."""
    if "embedded" not in report.engines:
        return []
    kept, all_of_them = compute_ratio(report, "embedded"), compute_ratios(report, "embedded")
    measured = f"{kept:.3f} (rounds: {min(all_of_them):.3f} to {max(all_of_them):.3f})"
    return [Promise("throughput of the embedded engine, captured", "at least 0.95", measured, kept >= 0.95)]


def to_json(report: TaxReport) -> bytes:
    found = {kind: {way: compute_ratio(report, kind, way) for way in ways} for kind, ways in report.engines.items()}
    told: dict[str, Any] = {"machine": describe_machine(), **msgspec.structs.asdict(report)}
    return msgspec.json.encode(told | {"ratios": found, "promises": list_promises(report)})


def print_report(report: TaxReport, console: Console) -> None:
    plan = report.plan
    title = f"{plan.conversations} conversations at a time, {plan.turns} turns of up to {plan.tokens} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("engine", "", "tokens/s", "by round", "against the engine alone", "gateway's CPU, ms/token"):
        table.add_column(column, justify="left" if column in ("engine", "") else "right")
    for row in _iterate_rows(report):
        table.add_row(*row)
    console.print(table)
    print_promises(list_promises(report), console)


def _iterate_rows(report: TaxReport) -> Iterator[tuple[str, ...]]:
    for kind, ways in report.engines.items():
        for way in (OFF, LOGPROBS, ON):
            rates = " ".join(f"{rate:.1f}" for rate in ways[way].rates)
            cpu = f"{1e3 * ways[way].gateway_cpu / ways[way].tokens:.2f}" if way == ON else ""
            yield kind, way, f"{ways[way].rate:.1f}", rates, f"{compute_ratio(report, kind, way):.3f}", cpu


# The command


@click.command("tax")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Load this model into the embedded engine [default: SmolLM2-135M-Instruct].",
)
@click.option("--device", help="Run the embedded engine on this device [default: a GPU where there is one].")
@click.option("--threads", type=int, help="Give the embedded engine this many CPU threads [default: PyTorch's choice].")
@click.option("--vllm", metavar="URL", help="Measure the vLLM server at this URL, too; it runs on this machine.")
@click.option("--no-embedded", is_flag=True, help="Measure vLLM alone.")
@click.option("--conversations", type=click.IntRange(min=1), help="Hold this many at the same time [default: 16].")
@click.option("--turns", type=click.IntRange(min=2), help="Take this many turns in each [default: 3].")
@click.option("--words", type=click.IntRange(min=1), help="Begin each with this many words [default: 60].")
@click.option("--tokens", type=click.IntRange(min=1), help="Sample at most this many in a turn [default: 32].")
@click.option("--rounds", type=click.IntRange(min=1), help="Measure each way this many times [default: 3].")
@click.option("--quick", is_flag=True, help="Hold fewer and shorter conversations.")
@json_option
def command(
    model: Path | None,
    device: str | None,
    threads: int | None,
    vllm: str | None,
    no_embedded: bool,
    quick: bool,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Measure tokens a second of an engine whose calls are captured, against those of the engine alone."""
    given = {name: size for name, size in sizes.items() if size is not None}
    plan = msgspec.structs.replace(QUICK if quick else TaxPlan(), **given)
    options = {name: value for name, value in {"device": device, "threads": threads}.items() if value is not None}
    folder = None if model is None else str(model)
    embedded = None if no_embedded else EngineSettings(kind="embedded", model=folder, options=options)
    measured = run_async(run(plan, embedded, vllm, make_progress_printer()))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())

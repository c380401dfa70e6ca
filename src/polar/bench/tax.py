"""`polar bench tax`: tokens a second of an engine whose calls Polar captures, against those of the engine alone.

Three ways take turns in short rounds: straight to the engine, the same with log-probabilities, and through a gateway
that stores everything. The engine and the gateway are processes of their own; what the gateway takes from the engine's
CPUs is part of the tax, and so are log-probabilities, which nobody needs who does not train.
"""

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
from msgspec import Struct, field

from polar.bench.client import BenchError
from polar.bench.peers.gateway import GatewayAddresses
from polar.bench.process import ServerProcess
from polar.bench.tax_load import (
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
Progress = Callable[[str], None]


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
            report.engines[embedded.kind] = await _taxed(launched.url, plan, lambda it: progress(f"embedded: {it}"))
        finally:
            await launched.stop()
    if vllm is not None:
        report.engines["vllm"] = await _taxed(vllm, plan, lambda it: progress(f"vllm: {it}"))
    return report


async def _taxed(engine_url: str, plan: TaxPlan, progress: Progress) -> dict[str, RoundTotals]:
    measured = {OFF: RoundTotals(), LOGPROBS: RoundTotals(), ON: RoundTotals()}
    async with (
        _gateway(engine_url) as (server, addresses),
        AsyncClient(addresses.control) as client,
        _connections() as http,
    ):
        captured = CapturedClient(addresses.gateway, client, http)
        progress("first conversations")
        begun = 0
        await measure(captured, plan, begun, RoundTotals())
        between = _between(await captured.stored(addresses.control))
        alone = DirectClient(engine_url, between, logprobs=False)
        with_logprobs = DirectClient(engine_url, between, logprobs=True)
        ways: dict[str, ConversationClient] = {OFF: alone, LOGPROBS: with_logprobs, ON: captured}
        try:
            for number in range(plan.rounds):
                # There and back: what the machine does meanwhile hits all of them alike.
                for name in list(ways)[:: -1 if number % 2 else 1]:
                    begun += plan.conversations
                    progress(f"{name}, round {number + 1} of {plan.rounds}")
                    cpu = server.cpu()
                    await measure(ways[name], plan, begun, measured[name])
                    measured[name].gateway_cpu += server.cpu() - cpu
                _check(await captured.stored(addresses.control), plan)
        finally:
            await alone.close()
            await with_logprobs.close()
    return measured


@contextlib.asynccontextmanager
async def _gateway(engine_url: str) -> AsyncIterator[tuple[ServerProcess, GatewayAddresses]]:
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as folder:
        argv = [sys.executable, "-m", "polar.bench.peers.gateway", engine_url, str(Path(folder) / "data")]
        async with ServerProcess(argv, None, Path(folder) / "log", speaks=True) as server:
            yield server, await server.hear(GatewayAddresses)


def _connections() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def _between(sessions: list[list[StoredExchange]]) -> list[int]:
    """The ids that a gateway puts between a turn that was sampled and the next one."""
    for first, second, *_ in sessions:
        if first.prompt_ids and first.sampled_ids and second.prompt_ids:
            return second.prompt_ids[len(first.prompt_ids) + len(first.sampled_ids) :]
    raise BenchError("Polar captured no token ids: does the engine tell where its model's folder is?")


def _check(sessions: list[list[StoredExchange]], plan: TaxPlan) -> None:
    """The figures are those of a gateway that kept everything, or there are none."""
    for exchanges in sessions:
        if len(exchanges) != plan.turns:
            raise BenchError(f"Polar stored {len(exchanges)} of {plan.turns} calls.")
        for turn, exchange in enumerate(exchanges):
            if not exchange.is_whole or (turn and exchange.continuation != "recorded"):
                raise BenchError(
                    f"Polar did not capture a call whole: {exchange.untrainable}, {exchange.continuation}."
                )

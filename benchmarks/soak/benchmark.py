"""`make bench-soak`: whether the service's memory stops growing.

    callers (here) ─► service (process: gateway, control plane, store) ─► scripted engine (process)

Callers go through sessions as harnesses do: each is created through the control plane, makes calls that grow by a turn
and a tool result, and is ended there. One caller has long sessions of short turns, the others short ones of long turns;
every second caller streams. The service's resident memory is read as calls are answered. Caches fill up to their bounds
in the first half; in the second half it must not grow by more than 2 %.
"""

import asyncio
import contextlib
import csv
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct, field

from benchmarks.client import BenchmarkError, Connection, encode_post, get_port
from benchmarks.command_line import Progress, json_option, make_progress_printer
from benchmarks.polar_server import GatewayAddresses
from benchmarks.process import ServerProcess, run_async
from benchmarks.report import MB
from polar.dialects.sse import EventParser
from polar.engines.scripted import TOKENIZER_FOLDER
from polar.errors import ConfigError

ALLOWED_GROWTH = 0.02
_CALLERS = 4
_REPLY_WORDS = 30
_VOCABULARY = """self value return index request error for in range result handle session token stream parse None import
from yield await class def test assert path lines buffer state event config update with open the of a is not"""
_WORDS = _VOCABULARY.split()
_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class SoakPlan(Struct, frozen=True):
    calls: int = 50_000
    sample_every: int = 500  # calls
    turns: int = 6  # of a short session
    result_words: int = 1600  # of a short session's tool results: about 10 KB
    long_turns: int = 300
    long_result_words: int = 20


class SoakSample(Struct, frozen=True):
    calls: int
    sessions: int  # that have ended
    seconds: float
    resident: int  # bytes


class SoakReport(Struct):
    plan: SoakPlan
    samples: list[SoakSample] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of the last half, as a share: from the median of its first tenth to the median of its last one."""
        half = self.samples[len(self.samples) // 2 :]
        some = max(1, len(half) // 10)
        begin, end = _compute_median(half[:some]), _compute_median(half[-some:])
        return end / begin - 1

    @property
    def passed(self) -> bool:
        return self.growth < ALLOWED_GROWTH


class _Created(Struct):
    session_id: str
    api_key: str


async def run(plan: SoakPlan, progress: Progress) -> SoakReport:
    report = SoakReport(plan)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-soak-")))

        async def start(name: str, *argv: str) -> ServerProcess:
            server = ServerProcess([sys.executable, "-m", *argv], None, folder / f"{name}.log", speaks=True)
            return await stack.enter_async_context(server)

        engine = await start("engine", "benchmarks.soak.engine", str(plan.long_turns), str(_REPLY_WORDS))
        engine_url = await engine.read_message(str)
        service = await start(
            "service", "benchmarks.polar_server", engine_url, str(folder / "data"), str(TOKENIZER_FOLDER)
        )
        addresses = await service.read_message(GatewayAddresses)
        load = _Load(plan, addresses, service, report, progress)
        await asyncio.gather(*(load.call_until_done(number) for number in range(_CALLERS)))
    return report


class _Load:
    def __init__(
        self,
        plan: SoakPlan,
        addresses: GatewayAddresses,
        service: ServerProcess,
        report: SoakReport,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._gateway, self._control = get_port(addresses.gateway), get_port(addresses.control)
        self._service = service
        self._report = report
        self._progress = progress
        self._calls = self._sessions = 0
        self._began = time.monotonic()

    async def call_until_done(self, number: int) -> None:
        rng = random.Random(number)
        connection = await Connection.open(self._gateway)
        turns, words = self._plan.turns, self._plan.result_words
        if number == 0:
            turns, words = self._plan.long_turns, self._plan.long_result_words
        while self._calls < self._plan.calls:
            answer = await self._ask_control("/sessions", {"metadata": {"task_id": f"task-{rng.randrange(10**9)}"}})
            session = msgspec.json.decode(answer, type=_Created)
            await self._hold_session(connection, session.api_key, rng, turns, words, stream=number % 2 == 1)
            await self._ask_control(f"/sessions/{session.session_id}/end", {"reward": 1.0})
            self._sessions += 1
        connection.close()

    async def _hold_session(
        self, connection: Connection, key: str, rng: random.Random, turns: int, words: int, *, stream: bool
    ) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are an agent that repairs programs. " * 50},
            {"role": "user", "content": _make_text(rng, words)},
        ]
        for _ in range(turns):
            body = {"model": "m", "messages": messages, "tools": [_TOOL], "stream": stream}
            answer = await connection.call(encode_post("/v1/chat/completions", msgspec.json.encode(body), key))
            turn = read_stream(answer.read_content()) if stream else _read_whole(answer.read_content())
            messages.append(turn)
            calls = turn.get("tool_calls") or []
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": _make_text(rng, words)} for call in calls
            ] or [{"role": "user", "content": _make_text(rng, words)}]
            self._count_call()
            if self._calls >= self._plan.calls:
                return

    def _count_call(self) -> None:
        self._calls += 1
        if self._calls % self._plan.sample_every == 0:
            seconds = time.monotonic() - self._began
            sample = SoakSample(self._calls, self._sessions, seconds, self._service.read_memory_bytes())
            self._report.samples.append(sample)
            if len(self._report.samples) % 10 == 0:
                self._progress(f"{sample.calls:,} calls, {sample.sessions:,} sessions: {sample.resident / MB:.1f} MB")

    async def _ask_control(self, path: str, fields: dict[str, object]) -> bytes:
        """On a connection of its own: the control plane closes those that are idle."""
        connection = await Connection.open(self._control)
        answer = await connection.call(encode_post(path, msgspec.json.encode(fields)))
        connection.close()
        return answer.read_content()


def _make_text(rng: random.Random, words: int) -> str:
    """Unlike any other, as tools' results are."""
    return f"{rng.getrandbits(64):x} {' '.join(rng.choices(_WORDS, k=words))}"


def _read_whole(body: bytes) -> dict[str, Any]:
    turn: dict[str, Any] = msgspec.json.decode(body)["choices"][0]["message"]
    return turn


def read_stream(body: bytes) -> dict[str, Any]:
    """The turn put together from its deltas."""
    turn: dict[str, Any] = {"role": "assistant"}
    calls: list[dict[str, Any]] = []
    parser = EventParser()
    for data in parser.feed(body):
        if data == b"[DONE]":
            break
        for choice in msgspec.json.decode(data).get("choices", ()):
            delta = choice["delta"]
            for name, value in delta.items():
                if isinstance(value, str) and name != "role":
                    turn[name] = turn.get(name, "") + value
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[piece["index"]]["function"][name] += piece["function"].get(name) or ""
    if not calls and "content" not in turn:
        raise BenchmarkError(f"The gateway streamed no turn: {body[:300].decode(errors='replace')}")
    return turn | {"tool_calls": calls} if calls else turn


def _compute_median(samples: Sequence[SoakSample]) -> float:
    return statistics.median(sample.resident for sample in samples)


def write_csv(report: SoakReport, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(SoakSample.__struct_fields__)
        for sample in report.samples:
            writer.writerow([sample.calls, sample.sessions, f"{sample.seconds:.1f}", sample.resident])


def draw_memory(report: SoakReport, path: Path) -> None:
    """As SVG or PNG, by the path's suffix."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("The plot needs matplotlib: pip install matplotlib, or leave --plot out.") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "soak"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    calls = [sample.calls for sample in report.samples]
    axes.plot(calls, [sample.resident / MB for sample in report.samples], color="#1a7f5a")
    axes.axvspan(calls[len(calls) // 2], calls[-1], color="#eef1f4", zorder=0)
    axes.set(xlabel="captured calls", ylabel="resident memory (MB)", ylim=(0, None))
    axes.set_title(f"The service's memory; shaded: the last half, {report.growth:+.1%}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


# The command


@click.command("soak")
@click.option("--calls", default=50_000, show_default=True, type=click.IntRange(min=2_000), help="Make so many calls.")
@click.option("--csv", "table", type=click.Path(path_type=Path, dir_okay=False), help="Write the samples to this file.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the samples into this file: .svg or .png."
)
@json_option
def command(calls: int, table: Path | None, plot: Path | None, as_json: bool) -> None:
    """Make many calls in many sessions and watch the service's resident memory.

    Exit with status 1 where the memory grows by 2 % or more in the last half of the calls.
    """
    measured = run_async(run(SoakPlan(calls=calls), make_progress_printer()))
    if table is not None:
        write_csv(measured, table)
    if plot is not None:
        draw_memory(measured, plot)
    if as_json:
        click.echo(msgspec.json.encode(measured))
    else:
        last = measured.samples[-1]
        click.echo(
            f"{last.calls:,} calls in {last.sessions:,} sessions, {last.seconds:.0f} s: {last.resident / MB:.0f} MB "
            f"resident, {measured.growth:+.2%} in the last half (allowed: +{ALLOWED_GROWTH:.0%})"
        )
    if not measured.passed:
        raise SystemExit(1)

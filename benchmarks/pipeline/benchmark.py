"""`make bench-pipeline`: how busy an engine is kept by sessions with long tails, slow INIT and slow evaluation.

    stages      the production node: stages, prewarming, gateway, store
    one by one  as many workers as it has run slots, each with one session from its INIT to its evaluation
    the same, as many workers as the node has in all of its stages together

The engine is simulated, with a fixed batch limit, in a process of its own; so is what takes time in runtimes. All
sides have the same sessions in the same order, and a gateway and a store of their own.
"""

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from html import escape
from pathlib import Path

import click
import msgspec
import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError, Connection, encode_get
from benchmarks.command_line import CountedProgress, json_option, make_console, open_progress_bar
from benchmarks.pipeline.engine import EngineCall, Utilization, Window, compute_slot_series, compute_utilization
from benchmarks.pipeline.runtime import (
    NAME,
    NUMBER,
    SECONDS,
    TURNS,
    SessionTimeline,
    SimulatedBackend,
    SimulatedBackends,
)
from benchmarks.pipeline.workload import WorkloadSession, make_sessions
from benchmarks.process import ServerProcess, run_async
from benchmarks.report import LatencySummary, Promise, describe_machine, make_promise_table
from polar.config import EngineSettings, GatewaySettings, NodeSettings, PrewarmSettings, Settings
from polar.gateway.data_plane import DataPlane
from polar.gateway.process import tune_process
from polar.harnesses import build_environment
from polar.node.node_service import make_node
from polar.records.session import Verdict
from polar.records.task import AgentRequest, CustomShell, EvaluatorRequest, RuntimeRequest, TaskRequest
from polar.runtimes.base import Runtime, RuntimeSpec

SERIES_STEP_SECONDS = 0.25  # seconds between the points of the picture
_RUN_TIMEOUT_SECONDS = 600.0  # seconds of a session
_ONE_BY_ONE = "one by one, {} workers"

Done = Callable[[], None]


class PipelinePlan(Struct, frozen=True):
    """Times are medians, in seconds."""

    slots: int = 16  # the engine's batch limit
    sessions: int = 200
    run_seconds: float = 3.0
    tools: float = 1 / 3  # of a run
    start_seconds: float = 3.0
    grading_seconds: float = 3.0
    init_workers: int = 32
    ready_buffer: int = 8
    run_workers: int = 32
    postrun_workers: int = 24
    prewarm: int = 40  # the run slots and READY can be filled at once
    seed: int = 0

    @property
    def workers(self) -> int:
        """Of all stages."""
        return self.init_workers + self.ready_buffer + self.run_workers + self.postrun_workers


QUICK = PipelinePlan(sessions=120, run_seconds=1.5, start_seconds=1.5, grading_seconds=1.5)


class Side(Struct):
    """What was measured of one way to run the sessions."""

    name: str
    workers: int  # sessions that may run at the same time
    steady: (
        Utilization  # from the first model call until the last session has made its first: there was always more to do
    )
    whole: Utilization  # from the first task until the last session has ended
    sessions_per_minute: float  # that ended, while it was steady
    most_runtimes: int  # at once
    batch: list[float]  # slots in use in each STEP, from the first task on
    steady_from: float  # seconds from the first task
    steady_until: float


class PipelineReport(Struct):
    plan: PipelinePlan
    run_p50: float  # seconds of the runs, were each alone
    run_p99: float
    stages: Side
    one_by_one: Side
    as_many_workers: Side
    refill: LatencySummary  # from the end of a run to the first call of the next session in its slot
    prewarmed: float  # of the evaluations: the share whose runtime had been made before they began


async def run(plan: PipelinePlan, progress: CountedProgress) -> PipelineReport:
    work = make_sessions(
        plan.sessions, run=plan.run_seconds, tools=plan.tools, grading=plan.grading_seconds, seed=plan.seed
    )
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "benchmarks.pipeline.engine", str(plan.slots)]
        async with ServerProcess(argv, max(os.sched_getaffinity(0)), folder / "engine.log", speaks=True) as engine:
            bench = _Bench(plan, work, await engine.read_message(str), folder, progress)
            staged = await bench.measure("stages and prewarming", plan.run_workers, bench.run_through_stages)
            few = await bench.measure(_ONE_BY_ONE.format(plan.run_workers), plan.run_workers, bench.run_one_by_one)
            many = await bench.measure(_ONE_BY_ONE.format(plan.workers), plan.workers, bench.run_one_by_one)
    p50, p99 = np.percentile([session.seconds for session in work], [50, 99])
    return PipelineReport(
        plan,
        float(p50),
        float(p99),
        staged.side,
        few.side,
        many.side,
        refill=LatencySummary.from_seconds(compute_refill_seconds(list(staged.lives.values()), plan.run_workers)),
        prewarmed=sum(life.fresh_at < life.taken_at for life in staged.lives.values()) / len(staged.lives),
    )


def compute_refill_seconds(lives: list[SessionTimeline], slots: int) -> list[float]:
    """Seconds from each end of a run to the first call of the session that got its slot. Slots are alike: the first
    that falls free goes to the first session beyond those that filled them all."""
    ends = sorted(life.ended_at for life in lives)
    calls = sorted(life.called_at for life in lives)
    return [call - end for end, call in zip(ends, calls[slots:], strict=False)]


class _Measured(Struct):
    side: Side
    lives: dict[int, SessionTimeline]


class _Bench:
    def __init__(
        self, plan: PipelinePlan, work: list[WorkloadSession], engine_url: str, folder: Path, progress: CountedProgress
    ) -> None:
        self._plan = plan
        self._work = work
        self._engine_url = engine_url
        self._folder = folder
        self._progress = progress
        self._settings = Settings(
            engine=EngineSettings(kind="vllm", urls=[engine_url], render="engine"),
            gateway=GatewaySettings(port=0),
            node=NodeSettings(
                init_workers=plan.init_workers,
                ready_buffer=plan.ready_buffer,
                run_workers=plan.run_workers,
                postrun_workers=plan.postrun_workers,
                prewarm=[PrewarmSettings(runtime={"backend": NAME}, count=plan.prewarm)] if plan.prewarm else [],
            ),
        )

    async def measure(
        self,
        name: str,
        workers: int,
        through: Callable[[DataPlane, SimulatedBackend, Path, int, Done], Awaitable[float]],
    ) -> _Measured:
        plan, total, done = self._plan, len(self._work), 0
        data = self._folder / name.replace(" ", "-")

        def one_done() -> None:
            nonlocal done
            done += 1
            self._progress(name, done, total)

        self._progress(name, 0, total)
        async with DataPlane(self._settings, data) as service:
            await self._take_calls()  # those with which the gateway made the engine's acquaintance
            kind = SimulatedBackend(
                data / "simulated", service.gateway_url, start_seconds=plan.start_seconds, seed=plan.seed
            )
            started_at = await through(service, kind, data, workers, one_done)
            whole = Window(started_at, time.monotonic())
        calls = await self._take_calls()
        lives = list(kind.lives.values())
        steady = Window(min(life.called_at for life in lives), max(life.called_at for life in lives))
        ended = sum(life.ended_at <= steady.end for life in lives)
        side = Side(
            name,
            workers,
            compute_utilization(calls, plan.slots, steady),
            compute_utilization(calls, plan.slots, whole),
            ended / steady.seconds * 60,
            kind.most,
            compute_slot_series(calls, whole, SERIES_STEP_SECONDS),
            steady.begin - started_at,
            steady.end - started_at,
        )
        return _Measured(side, kind.lives)

    async def run_through_stages(self, plane: DataPlane, kind: SimulatedBackend, _: Path, __: int, done: Done) -> float:
        """The production node. When the first task came."""
        node = make_node(plane, SimulatedBackends(kind))
        async with node:
            await kind.wait_until_started(self._plan.prewarm)  # the node was there before the tasks
            started_at = time.monotonic()
            running = [await node.submit(await node.plan(_make_task(session))) for session in self._work]
            for finished in asyncio.as_completed([one.finished for one in running]):
                ended = await finished
                if ended.verdict.reward != 1.0:
                    raise BenchmarkError(
                        f"Session {ended.task_id} went wrong: {ended.verdict.reason}. {ended.error or ''}"
                    )
                done()
        return started_at

    async def run_one_by_one(
        self,
        service: DataPlane,
        kind: SimulatedBackend,
        data: Path,  # noqa: ARG002
        workers: int,
        done: Done,
    ) -> float:
        """A worker has one session at a time, and makes what it needs when it needs it."""
        started_at = time.monotonic()
        left = iter(self._work)

        async def worker() -> None:
            for session in left:
                await _run_session(session, service, kind)
                done()

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
        return started_at

    async def _take_calls(self) -> list[EngineCall]:
        connection = await Connection.open(int(self._engine_url.rpartition(":")[2]))
        try:
            return msgspec.json.decode(
                (await connection.call(encode_get("/calls"))).read_content(), type=list[EngineCall]
            )
        finally:
            connection.close()


async def _run_session(session: WorkloadSession, service: DataPlane, kind: SimulatedBackend) -> None:
    opened, key = await service.sessions.create({"task_id": str(session.number)})
    agent = await _start_runtime(kind)
    await agent.run(["agent"], env=build_environment(agent.gateway_url(), key, NAME) | _make_agent_variables(session))
    await service.sessions.end(opened.session_id)
    await agent.stop()
    fresh = await _start_runtime(kind)
    await fresh.run(["evaluate"], env=_make_evaluator_variables(session))
    await service.sessions.end(opened.session_id, Verdict(1.0))
    await fresh.remove()
    await agent.remove()


async def _start_runtime(kind: SimulatedBackend) -> Runtime:
    runtime = await kind.create(secrets.token_hex(8), RuntimeSpec())
    await runtime.start()
    return runtime


def _make_task(session: WorkloadSession) -> TaskRequest:
    return TaskRequest(
        task_id=str(session.number),
        instruction="",
        timeout_seconds=_RUN_TIMEOUT_SECONDS,
        runtime=RuntimeRequest(backend=NAME),
        agent=AgentRequest(custom_shell=CustomShell(command="agent"), env=_make_agent_variables(session)),
        evaluator=EvaluatorRequest(
            strategy="command", config={"command": ["evaluate"]}, env=_make_evaluator_variables(session)
        ),
    )


def _make_agent_variables(session: WorkloadSession) -> dict[str, str]:
    return {NUMBER: str(session.number), TURNS: msgspec.json.encode(session.turns).decode()}


def _make_evaluator_variables(session: WorkloadSession) -> dict[str, str]:
    return {NUMBER: str(session.number), SECONDS: str(session.grading_seconds)}


# Promises and tables

_PROMISED = 0.95


def list_promises(report: PipelineReport) -> list[Promise]:
    """The engine's slots count, not just whether it does anything; as long as there are sessions left to take up: how
    a finite number of them ends depends on the longest alone."""
    busy = report.stages.steady.slots
    what = "engine's batch in use, while there is more to do"
    return [Promise(what, f"at least {_PROMISED:.0%}", f"{busy:.1%}", busy >= _PROMISED)]


def to_json(report: PipelineReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def print_report(report: PipelineReport, console: Console) -> None:
    for table in (_make_side_table(report), _make_node_table(report), make_promise_table(list_promises(report))):
        console.print(table)


def _make_side_table(report: PipelineReport) -> Table:
    plan = report.plan
    title = (
        f"{plan.sessions} sessions, an engine with {plan.slots} slots; runs p50 {report.run_p50:.1f} s, "
        f"p99 {report.run_p99:.1f} s ({report.run_p99 / report.run_p50:.1f} x)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in (
        "batch in use",
        "idle",
        "time full",
        "calls waiting",
        "sessions a minute",
        "batch in use, whole run",
        "whole run",
        "most runtimes",
    ):
        table.add_column(column, justify="right")
    for side in (report.stages, report.one_by_one, report.as_many_workers):
        table.add_row(*_format_side(side))
    return table


def _format_side(side: Side) -> tuple[str, ...]:
    steady, whole = side.steady, side.whole
    return (
        side.name,
        f"{steady.slots:.1%}",
        f"{1 - steady.slots:.1%}",
        f"{steady.full:.1%}",
        f"{steady.waiting:.1f}",
        f"{side.sessions_per_minute:.0f}",
        f"{whole.slots:.1%}",
        f"{whole.seconds:.0f} s",
        str(side.most_runtimes),
    )


def _make_node_table(report: PipelineReport) -> Table:
    table = Table(title="The node's stages", title_justify="left", show_header=False)
    refill = report.refill
    table.add_row(
        "from the end of a run to the next session's first call, p50 / p99 (ms)", f"{refill.p50:.1f} / {refill.p99:.1f}"
    )
    table.add_row("evaluations whose runtime had been made before they began", f"{report.prewarmed:.1%}")
    return table


# The picture

_WIDTH, _HEIGHT = 760, 110  # of a panel's plot
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 50, 20, 50, 46, 44
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600)  # seconds from one to the next
_MOST_TICKS = 12
_COLOURS = ("#1a7f5a", "#b4532a", "#8a6d1d")


def draw_svg(report: PipelineReport) -> str:
    sides = (report.stages, report.one_by_one, report.as_many_workers)
    seconds = max(side.whole.seconds for side in sides)
    height = _TOP + len(sides) * (_HEIGHT + _GAP) + _BOTTOM - _GAP
    width = _LEFT + _WIDTH + _RIGHT
    title = f"Calls in the engine's batch of {report.plan.slots}, over time"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number, side in enumerate(sides):
        top = _TOP + number * (_HEIGHT + _GAP)
        lines += _draw_panel(side, report.plan.slots, top, _WIDTH / seconds, _COLOURS[number])
    bottom = height - _BOTTOM
    for tick in _choose_ticks(seconds):
        x = _LEFT + tick * _WIDTH / seconds
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    lines.append(f'<text x="{_LEFT}" y="{bottom + 34}">shaded: while there was more to do</text>')
    lines.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 34}" text-anchor="end">seconds from the first task</text>')
    return "\n".join([*lines, "</svg>", ""])


def _draw_panel(side: Side, slots: int, top: int, scale: float, colour: str) -> Iterator[str]:
    """`scale` is in pixels a second."""
    bottom = top + _HEIGHT
    told = f"{side.name}: {side.steady.slots:.1%} busy, {side.whole.slots:.1%} of the whole run"
    begin, end = (_LEFT + at * scale for at in (side.steady_from, side.steady_until))
    yield f'<text x="{_LEFT}" y="{top - 6}">{escape(told)}</text>'
    yield f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{_HEIGHT}" fill="#eef1f4"/>'
    points = [f"M{_LEFT},{bottom}"]
    for number, used in enumerate(side.batch):
        y = bottom - used / slots * _HEIGHT
        begin, end = (_LEFT + index * SERIES_STEP_SECONDS * scale for index in (number, number + 1))
        points.append(f"L{begin:.1f},{y:.1f}H{end:.1f}")
    yield f'<path d="{"".join(points)}V{bottom}Z" fill="{colour}" fill-opacity="0.75"/>'
    yield f'<path d="M{_LEFT},{top}H{_LEFT + _WIDTH}" stroke="#888" stroke-dasharray="4 3"/>'
    yield f'<path d="M{_LEFT},{top}V{bottom}H{_LEFT + _WIDTH}" stroke="#333" fill="none"/>'
    for value, y in ((slots, top), (0, bottom)):
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value}</text>'


def _choose_ticks(seconds: float) -> range:
    step = next((step for step in _TICKS if seconds / step <= _MOST_TICKS), _TICKS[-1])
    return range(0, int(seconds) + 1, step)


# The command


@click.command("pipeline")
@click.option("--quick", is_flag=True, help="Run fewer and shorter sessions: two minutes instead of four.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.svg"),
    show_default=True,
    help="Draw the engine's batch over time into this SVG file.",
)
@json_option
def command(quick: bool, picture: Path, as_json: bool) -> None:
    """Measure how busy the node's stages keep a simulated engine, against sessions run one by one."""
    tune_process()
    with open_progress_bar() as progress:
        measured = run_async(run(QUICK if quick else PipelinePlan(), progress))
    picture.write_text(draw_svg(measured), encoding="utf-8")
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())
    click.echo(f"The picture is in {picture}.", err=as_json)

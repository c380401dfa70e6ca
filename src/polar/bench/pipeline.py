"""`polar bench pipeline`: how busy an engine is kept by sessions with long tails, slow INIT and slow evaluation.

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
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from polar.bench.client import BenchError, Connection, encode_get
from polar.bench.pipeline_engine import EngineCall
from polar.bench.pipeline_runtime import (
    NAME,
    NUMBER,
    SECONDS,
    TURNS,
    SessionTimeline,
    SimulatedBackend,
    SimulatedBackends,
)
from polar.bench.pipeline_utilization import Utilization, Window, compute_slot_series, compute_utilization
from polar.bench.pipeline_workload import WorkloadSession, make_sessions
from polar.bench.process import ServerProcess
from polar.bench.sandbox import LatencySummary
from polar.config import EngineSettings, GatewaySettings, NodeSettings, PrewarmSettings, Settings
from polar.data_plane import DataPlane
from polar.harnesses import build_environment
from polar.node.node_service import make_node
from polar.records.session import Verdict
from polar.records.task import AgentRequest, CustomShell, EvaluatorRequest, RuntimeRequest, TaskRequest
from polar.runtimes.base import Runtime, RuntimeSpec

STEP = 0.25  # seconds between the points of the picture
_LIMIT = 600.0  # seconds of a session
_ONE_BY_ONE = "one by one, {} workers"

Progress = Callable[[str, int, int], None]
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


async def run(plan: PipelinePlan, progress: Progress) -> PipelineReport:
    work = make_sessions(
        plan.sessions, run=plan.run_seconds, tools=plan.tools, grading=plan.grading_seconds, seed=plan.seed
    )
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "polar.bench.pipeline_engine", str(plan.slots)]
        async with ServerProcess(argv, max(os.sched_getaffinity(0)), folder / "engine.log", speaks=True) as engine:
            bench = _Bench(plan, work, await engine.hear(str), folder, progress)
            staged = await bench.measure("stages and prewarming", plan.run_workers, bench.through_stages)
            few = await bench.measure(_ONE_BY_ONE.format(plan.run_workers), plan.run_workers, bench.one_by_one)
            many = await bench.measure(_ONE_BY_ONE.format(plan.workers), plan.workers, bench.one_by_one)
    p50, p99 = np.percentile([session.seconds for session in work], [50, 99])
    return PipelineReport(
        plan,
        float(p50),
        float(p99),
        staged.side,
        few.side,
        many.side,
        refill=LatencySummary.of(compute_refill_seconds(list(staged.lives.values()), plan.run_workers)),
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
        self, plan: PipelinePlan, work: list[WorkloadSession], engine_url: str, folder: Path, progress: Progress
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
            await self._calls()  # those with which the gateway made the engine's acquaintance
            kind = SimulatedBackend(
                data / "simulated", service.gateway_url, start_seconds=plan.start_seconds, seed=plan.seed
            )
            began = await through(service, kind, data, workers, one_done)
            whole = Window(began, time.monotonic())
        calls = await self._calls()
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
            compute_slot_series(calls, whole, STEP),
            steady.begin - began,
            steady.end - began,
        )
        return _Measured(side, kind.lives)

    async def through_stages(self, plane: DataPlane, kind: SimulatedBackend, _: Path, __: int, done: Done) -> float:
        """The production node. When the first task came."""
        node = make_node(plane, SimulatedBackends(kind))
        async with node:
            await kind.started(self._plan.prewarm)  # the node was there before the tasks
            began = time.monotonic()
            running = [await node.submit(await node.plan(_task(session))) for session in self._work]
            for finished in asyncio.as_completed([one.finished for one in running]):
                ended = await finished
                if ended.verdict.reward != 1.0:
                    raise BenchError(f"Session {ended.task_id} went wrong: {ended.verdict.reason}. {ended.error or ''}")
                done()
        return began

    async def one_by_one(
        self,
        service: DataPlane,
        kind: SimulatedBackend,
        data: Path,  # noqa: ARG002
        workers: int,
        done: Done,
    ) -> float:
        """A worker has one session at a time, and makes what it needs when it needs it."""
        began = time.monotonic()
        left = iter(self._work)

        async def worker() -> None:
            for session in left:
                await _from_init_to_evaluation(session, service, kind)
                done()

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
        return began

    async def _calls(self) -> list[EngineCall]:
        connection = await Connection.open(int(self._engine_url.rpartition(":")[2]))
        try:
            return msgspec.json.decode((await connection.call(encode_get("/calls"))).content(), type=list[EngineCall])
        finally:
            connection.close()


async def _from_init_to_evaluation(session: WorkloadSession, service: DataPlane, kind: SimulatedBackend) -> None:
    opened, key = await service.sessions.create({"task_id": str(session.number)})
    agent = await _started(kind)
    await agent.run(["agent"], env=build_environment(agent.gateway_url(), key, NAME) | _agent_variables(session))
    await service.sessions.end(opened.session_id)
    await agent.stop()
    fresh = await _started(kind)
    await fresh.run(["evaluate"], env=_evaluator_variables(session))
    await service.sessions.end(opened.session_id, Verdict(1.0))
    await fresh.remove()
    await agent.remove()


async def _started(kind: SimulatedBackend) -> Runtime:
    runtime = await kind.create(secrets.token_hex(8), RuntimeSpec())
    await runtime.start()
    return runtime


def _task(session: WorkloadSession) -> TaskRequest:
    return TaskRequest(
        task_id=str(session.number),
        instruction="",
        timeout_seconds=_LIMIT,
        runtime=RuntimeRequest(backend=NAME),
        agent=AgentRequest(custom_shell=CustomShell(command="agent"), env=_agent_variables(session)),
        evaluator=EvaluatorRequest(
            strategy="command", config={"command": ["evaluate"]}, env=_evaluator_variables(session)
        ),
    )


def _agent_variables(session: WorkloadSession) -> dict[str, str]:
    return {NUMBER: str(session.number), TURNS: msgspec.json.encode(session.turns).decode()}


def _evaluator_variables(session: WorkloadSession) -> dict[str, str]:
    return {NUMBER: str(session.number), SECONDS: str(session.grading_seconds)}

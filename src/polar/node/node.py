"""A gateway node: plans tasks, and runs their sessions through the stages.

    plan(task) -> submit(plan, sample) -> RunningSession -> FinishedSession

Sessions are independent; each is one asyncio task (session_run.py) that waits for its turn in each stage. If a node
dies, the next one on the same data folder cleans up after it (`sweep`): runtime backends find their sandboxes, and
scratch folders name the sessions that were running.
"""

import asyncio
import logging
import time
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from polar.config import Settings
from polar.engines.fleet import EngineFleet
from polar.errors import ConfigError
from polar.gateway.session_registry import SessionRegistry
from polar.node.finished_session import FinishedSession
from polar.node.runtime_pool import RuntimeBackends, WarmPool, WorkspaceSnapshots
from polar.node.session_run import NodeContext, SessionRun
from polar.node.stages import Stage, StageName
from polar.node.task_plan import TaskPlan, make_plan, make_prewarm_recipe
from polar.records.session import Verdict
from polar.records.task import TaskRequest
from polar.runtimes.base import SandboxError
from polar.runtimes.state_folder import StateFolder
from polar.store.base import Store
from polar.types import UsageTotals

log = logging.getLogger(__name__)

_WAITING_PER_INIT_WORKER = 2  # sessions that may queue for each INIT slot


class RunningSession:
    """A submitted session, queued or in a stage."""

    def __init__(self, session_run: SessionRun, finished: "asyncio.Task[FinishedSession]") -> None:
        self._session_run = session_run
        self.session_id = session_run.session_id
        self.plan = session_run.plan
        self.finished = finished

    @property
    def stage(self) -> StageName | None:
        return self._session_run.stage

    @property
    def tokens(self) -> int:
        return self._session_run.meter.tokens

    @property
    def usage(self) -> UsageTotals:
        return self._session_run.meter.usage_totals

    def cancel(self) -> bool:
        """Cancels the session in whatever stage it is: its reason becomes `cancelled`, and it is torn down. False where
        it was cancelled before or has its verdict already."""
        return self._session_run.cancel(self.finished)


class NodeLoad(Struct):
    """How many sessions are in each stage of a node, and how busy its engines are."""

    waiting: int  # sessions that wait for their first stage
    init: int
    ready: int
    run: int
    postrun: int  # including sessions that wait for it or are being torn down
    calls: int  # running at the engines
    held: int  # calls that wait until generation is resumed
    paused: bool
    tokens: int  # sampled so far, over all sessions


class Node:
    """Use as an async context manager, inside that of the gateway whose parts it is given."""

    def __init__(
        self,
        settings: Settings,
        data: Path,
        *,
        store: Store,
        sessions: SessionRegistry,
        pools: EngineFleet,
        gateway_url: str,
        runtime_backends: RuntimeBackends | None = None,
    ) -> None:
        """`runtime_backends` replaces the installed ones."""
        node = settings.node
        self._settings = settings
        self._store = store
        self._sessions = sessions
        self._pools = pools
        self._state = StateFolder(data / "node")
        self._runtime_backends = runtime_backends or RuntimeBackends(data / "runtimes", gateway_url, node.runtimes)
        self._context = NodeContext(
            settings=settings,
            data=data.absolute(),
            node_id=self._state.folder.name,
            store=store,
            sessions=sessions,
            warm_pool=WarmPool(
                self._runtime_backends,
                self._state.get_shared_path,
                max_launches=node.init_workers,
                max_expected=node.postrun_workers,
            ),
            snapshots=WorkspaceSnapshots(self._state.folder / "before"),
            init=Stage("init", node.init_workers),
            ready=Stage("ready", node.ready_buffer),
            run=Stage("run", node.run_workers),
            postrun=Stage("postrun", node.postrun_workers),
        )
        self._submitting: set[asyncio.Task[RunningSession]] = set()
        self._running: dict[str, RunningSession] = {}
        self._has_unrecorded = False  # the store lacks the verdict of a session
        self._tokens = 0  # of sessions that have ended
        self._used = UsageTotals()  # of sessions that have ended
        self.replaced: list[str] = []  # ids of dead nodes that left state in the data folder
        self.stopped: list[str] = []  # those of them that had been asked to stop

    @property
    def node_id(self) -> str:
        """New with every start."""
        return self._context.node_id

    async def available_backends(self) -> list[str]:
        """Names of the runtime backends that work on this machine."""
        return await self._runtime_backends.list_available()

    async def __aenter__(self) -> "Node":
        await self.sweep()
        node = self._settings.node
        recipes = [(make_prewarm_recipe(prewarm, node), prewarm.count) for prewarm in node.prewarm]
        for recipe, count in recipes:
            self._context.warm_pool.reserve(recipe, count)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def sweep(self) -> list[str]:
        """Cleans up after dead nodes. Returns the ids of the sessions that were running there."""
        await self._runtime_backends.sweep()
        lost = []
        for abandoned in self._state.iter_abandoned():
            self.replaced.append(abandoned.folder.name)
            if abandoned.was_ending:
                self.stopped.append(abandoned.folder.name)
            for folder in abandoned.runtime_folders:
                lost.append(folder.name)
                verdict = Verdict(reason="node_lost")
                await self._store.end_session(folder.name, ended_at=time.time(), verdict=verdict)
            try:
                await asyncio.to_thread(abandoned.remove)
            except SandboxError as error:
                log.error("%s", error)
        if lost:
            log.warning("%d sessions of a dead node have ended without a reward (node_lost).", len(lost))
        return lost

    def mark_ending(self) -> None:
        """Records on disk that this node was asked to stop, so that the next node on its folder can report it."""
        self._state.mark_ending()

    async def plan(self, task: TaskRequest) -> TaskPlan:
        """Raises ConfigError, with advice, where the task can't be run here."""
        try:
            task_plan = make_plan(task, self._settings.node)
            backend = await self._runtime_backends.get(task_plan.recipe.backend)
            if (problem := backend.check_image(task.runtime.image)) is not None:
                raise ConfigError(problem)
        except ConfigError as error:
            raise ConfigError(f"Task {task.task_id}: {error}") from error
        return task_plan

    async def wait_for_room(self) -> None:
        """Waits until another session should be submitted: few sessions queue for INIT, and grading keeps up."""
        context = self._context
        await context.postrun.wait_until_queue_below(context.run.size + 1)
        await context.init.wait_until_queue_below(_WAITING_PER_INIT_WORKER * context.init.size)

    def count_free_slots(self) -> int:
        """How many sessions may be submitted before `wait_for_room` would wait."""
        init = self._context.init
        return max(0, (1 + _WAITING_PER_INIT_WORKER) * init.size - init.active - init.waiting)

    async def submit(self, plan: TaskPlan, sample: int = 0, work_id: int | None = None) -> RunningSession:
        """Creates a session and queues it for its first stage. On return it is in the store; cancelling the caller does
        not stop that. `work_id` names the rollout server's work that the session is for."""
        submitting = asyncio.get_running_loop().create_task(self._submit(plan, sample, work_id))
        self._submitting.add(submitting)
        submitting.add_done_callback(self._submitting.discard)
        return await asyncio.shield(submitting)

    async def _submit(self, plan: TaskPlan, sample: int, work_id: int | None) -> RunningSession:
        session_run = await SessionRun.create(plan, sample, self._context, self._state.create_runtime_folder, work_id)
        running = RunningSession(session_run, asyncio.get_running_loop().create_task(session_run.run()))
        self._running[session_run.session_id] = running
        running.finished.add_done_callback(lambda _: self._on_session_done(session_run))
        return running

    def _on_session_done(self, session_run: SessionRun) -> None:
        self._tokens += session_run.meter.tokens
        self._used += session_run.meter.usage_totals
        self._has_unrecorded |= not session_run.is_recorded
        del self._running[session_run.session_id]

    def get_load(self) -> NodeLoad:
        stages = [running.stage for running in self._running.values()]
        pools = self._pools.get_pools_by_run().values()
        return NodeLoad(
            waiting=stages.count(None),
            init=stages.count("init"),
            ready=stages.count("ready"),
            run=stages.count("run"),
            postrun=stages.count("postrun"),
            calls=sum(len(replica.running) for pool in pools for replica in pool.replicas),
            held=sum(pool.gate.held for pool in pools),
            paused=all(pool.gate.paused for pool in pools),
            tokens=self._tokens + sum(running.tokens for running in self._running.values()),
        )

    def get_usage(self) -> UsageTotals:
        """Token usage of all sessions so far."""
        return sum((running.usage for running in self._running.values()), self._used)

    async def close(self) -> None:
        """Cancels the running sessions and removes everything that the node keeps on the machine."""
        if self._submitting:
            await asyncio.wait(self._submitting)
        sessions = list(self._running.values())
        for session in sessions:
            session.cancel()
        if sessions:
            await asyncio.wait([session.finished for session in sessions])
        await self._context.warm_pool.close()
        await self._runtime_backends.close()
        if not self._has_unrecorded:  # else the next node on this folder ends the open sessions
            await asyncio.to_thread(self._state.close)

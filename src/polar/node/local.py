"""Tasks run to their end in this process, without a server: a private gateway, a node, and nothing that listens to
anybody else.

    tasks -> Wanted -> sessions, one after the other -> node -> Finished, as they come
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from polar.config import Settings
from polar.export.polar import build_session_result
from polar.gateway.data_plane import DataPlane
from polar.node.finished_session import FinishedSession
from polar.node.node import Node, NodeLoad, RunningSession
from polar.node.node_service import make_node
from polar.node.task_plan import TaskPlan
from polar.records.task import TaskRequest
from polar.trajectory.checker import SessionChecker
from polar.types import UsageTotals

_POLL_SECONDS = 1.0  # between two looks at what is wanted, where that may be a matter of time


class SessionSource(Protocol):
    """Which sessions are to be run. What comes next may depend on what came of others."""

    def next_sample(self) -> tuple[TaskPlan, int] | None:
        """The next one, a sample of a task; None where there is none now."""
        ...

    def record_finished(self, finished: FinishedSession) -> bool:
        """Whether that is its last word. Else it is tried again, and nobody needs to hear of it."""
        ...

    @property
    def num_left(self) -> int:
        """That may still come, as far as is known, besides those that `next` gave."""
        ...


class AllSamples:
    """Every sample of every task, the urgent ones first."""

    def __init__(self, plans: Iterable[TaskPlan]) -> None:
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._samples = iter([(plan, sample) for plan in ordered for sample in range(plan.task.num_samples)])
        self.num_left = sum(plan.task.num_samples for plan in ordered)

    def next_sample(self) -> tuple[TaskPlan, int] | None:
        found = next(self._samples, None)
        self.num_left -= found is not None
        return found

    def record_finished(self, finished: FinishedSession) -> bool:  # noqa: ARG002
        return True


class LocalRollout:
    """Use as an async context manager."""

    def __init__(self, settings: Settings, data: Path) -> None:
        self._settings = settings
        self._data = data
        self._stack = contextlib.AsyncExitStack()
        self._running: set[RunningSession] = set()
        self._finished: asyncio.Queue[asyncio.Task[FinishedSession] | None] = asyncio.Queue()  # None: look again
        self._changed = asyncio.Event()  # something ended, or was cancelled
        self._cancelled = False
        self._checker = SessionChecker(settings.verify.share)
        self.plane: DataPlane
        self.node: Node

    async def __aenter__(self) -> "LocalRollout":
        async with contextlib.AsyncExitStack() as stack:
            plane = self.plane = await stack.enter_async_context(DataPlane(self._settings, self._data))
            plane.check_engine()
            self.node = await stack.enter_async_context(make_node(plane))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def plan(self, tasks: Iterable[TaskRequest]) -> list[TaskPlan]:
        """Raises ConfigError for the first one that can't be run here, before any is."""
        return [await self.node.plan(task) for task in tasks]

    async def run(self, source: Iterable[TaskPlan] | SessionSource) -> AsyncIterator[FinishedSession]:
        """Every sample of every task (or whatever is wanted), each as soon as it has ended. Those that run when nobody
        reads on any more are cancelled."""
        sessions = AllSamples(source) if isinstance(source, Iterable) else source
        self._cancelled = False
        feeding = asyncio.get_running_loop().create_task(self._submit_sessions(sessions))
        try:
            while not feeding.done() or self._running or not self._finished.empty():
                finished = await self._finished.get()
                if finished is not None:
                    yield finished.result()
            await feeding
        finally:
            self.cancel()
            feeding.cancel()
            await asyncio.wait({feeding, *(running.finished for running in self._running)})

    async def _submit_sessions(self, source: SessionSource) -> None:
        try:
            while not self._cancelled and (source.num_left or self._running):
                await self.node.wait_for_room()
                self._changed.clear()
                found = None if self._cancelled else source.next_sample()
                if found is not None:
                    running = await self.node.submit(*found)
                    self._running.add(running)
                    running.finished.add_done_callback(partial(self._on_session_done, running, source))
                    if self._cancelled:  # meanwhile
                        running.cancel()
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_SECONDS):
                            await self._changed.wait()
        finally:
            self._finished.put_nowait(None)

    def _on_session_done(
        self, running: RunningSession, source: SessionSource, task: asyncio.Task[FinishedSession]
    ) -> None:
        self._running.discard(running)
        broken = task.cancelled() or task.exception() is not None  # who reads it hears why
        if broken or source.record_finished(task.result()) or self._cancelled:
            self._finished.put_nowait(task)
        self._changed.set()
        self._finished.put_nowait(None)

    def cancel(self) -> None:
        """Those that run end as cancelled, and those that have not begun never do."""
        self._cancelled = True
        for running in self._running:
            running.cancel()
        self._changed.set()
        self._finished.put_nowait(None)

    @property
    def running(self) -> int:
        return len(self._running)

    def used(self) -> UsageTotals:
        """What all sessions used so far."""
        return self.node.used()

    def load(self) -> NodeLoad:
        return self.node.load()

    async def build_result(self, plan: TaskPlan, finished: FinishedSession) -> dict[str, Any]:
        """The session as trainers read it (records.result.SessionResult); held back where it fails the check."""
        store = self.plane.store
        session = await store.session(finished.session_id)
        assert session is not None
        exchanges = [exchange async for exchange in store.exchanges(finished.session_id)]

        return await asyncio.to_thread(
            build_session_result,
            session,
            exchanges,
            plan.task.builder.strategy,
            self._checker,
            stages=finished.seconds,
            error=finished.error,
            outcome=None if finished.outcome is None else msgspec.to_builtins(finished.outcome),
            detail=finished.verdict.detail,
            mask_traces=plan.task.semantics.mask_traces,
        )

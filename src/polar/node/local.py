"""Runs tasks in this process, without a server: a private gateway and a node.

tasks -> SessionSource -> samples -> node -> FinishedSession, as each ends
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

_POLL_SECONDS = 1.0  # before a source that has no sample now is asked again


class SessionSource(Protocol):
    """Decides which sessions are run. The next one may depend on the results of earlier ones."""

    def next_sample(self) -> tuple[TaskPlan, int] | None:
        """The next sample of a task to run; None where there is none now."""
        ...

    def record_finished(self, finished: FinishedSession) -> bool:
        """Takes note of a finished session. False where its sample will be retried, so that it is not reported."""
        ...

    @property
    def num_left(self) -> int:
        """How many samples `next_sample` may still return, as far as is known."""
        ...


class AllSamples:
    """Every sample of every task, by descending priority."""

    def __init__(self, plans: Iterable[TaskPlan]) -> None:
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._samples = iter([(plan, sample) for plan in ordered for sample in range(plan.task.num_samples)])
        self.num_left = sum(plan.task.num_samples for plan in ordered)

    def next_sample(self) -> tuple[TaskPlan, int] | None:
        sample = next(self._samples, None)
        self.num_left -= sample is not None
        return sample

    def record_finished(self, finished: FinishedSession) -> bool:  # noqa: ARG002
        return True


class LocalRollout:
    """Use as an async context manager."""

    def __init__(self, settings: Settings, data: Path) -> None:
        self._settings = settings
        self._data = data
        self._stack = contextlib.AsyncExitStack()
        self._running: set[RunningSession] = set()
        self._finished: asyncio.Queue[asyncio.Task[FinishedSession] | None] = asyncio.Queue()  # None: check again
        self._changed = asyncio.Event()  # a session ended, or the run was cancelled
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
        """Plans all tasks before any is run. Raises ConfigError for the first one that can't be run here."""
        return [await self.node.plan(task) for task in tasks]

    async def run(self, source: Iterable[TaskPlan] | SessionSource) -> AsyncIterator[FinishedSession]:
        """Runs every sample of every task (or those of `source`), and yields each session as it ends. Closing the
        iterator cancels the sessions that still run."""
        sessions = AllSamples(source) if isinstance(source, Iterable) else source
        self._cancelled = False
        submitting = asyncio.get_running_loop().create_task(self._submit_sessions(sessions))
        try:
            while not submitting.done() or self._running or not self._finished.empty():
                finished = await self._finished.get()
                if finished is not None:
                    yield finished.result()
            await submitting
        finally:
            self.cancel()
            submitting.cancel()
            await asyncio.wait({submitting, *(running.finished for running in self._running)})

    async def _submit_sessions(self, source: SessionSource) -> None:
        try:
            while not self._cancelled and (source.num_left or self._running):
                await self.node.wait_for_room()
                self._changed.clear()
                sample = None if self._cancelled else source.next_sample()
                if sample is not None:
                    running = await self.node.submit(*sample)
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
        failed = task.cancelled() or task.exception() is not None  # the reader of the queue raises it
        if failed or source.record_finished(task.result()) or self._cancelled:
            self._finished.put_nowait(task)
        self._changed.set()
        self._finished.put_nowait(None)

    def cancel(self) -> None:
        """Cancels the running sessions; no other one begins."""
        self._cancelled = True
        for running in self._running:
            running.cancel()
        self._changed.set()
        self._finished.put_nowait(None)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def get_usage(self) -> UsageTotals:
        """Token usage of all sessions so far."""
        return self.node.get_usage()

    def get_load(self) -> NodeLoad:
        return self.node.get_load()

    async def build_result(self, plan: TaskPlan, finished: FinishedSession) -> dict[str, Any]:
        """Builds the session's result (records.result.SessionResult). Its traces are held back where it fails the
        check."""
        store = self.plane.store
        session = await store.find_session(finished.session_id)
        assert session is not None
        exchanges = [exchange async for exchange in store.read_exchanges(finished.session_id)]

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

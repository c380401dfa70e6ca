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
from polar.data_plane import DataPlane
from polar.errors import ConfigError
from polar.export.base import Item
from polar.node.finished import Finished
from polar.node.node import Load, Node, Running
from polar.node.plan import Plan
from polar.node.working import node_of
from polar.rollout.models import TaskRequest
from polar.rollout.results import session_result
from polar.trajectory.checker import HeldBack, SessionChecker
from polar.trajectory.session import build, nothing_of
from polar.trajectory.types import Sampled
from polar.types import Used

_LOOK_S = 1.0  # between two looks at what is wanted, where that may be a matter of time


class Wanted(Protocol):
    """Which sessions are to be run. What comes next may depend on what came of others."""

    def next(self) -> tuple[Plan, int] | None:
        """The next one, a sample of a task; None where there is none now."""
        ...

    def ended(self, finished: Finished) -> bool:
        """Whether that is its last word. Else it is tried again, and nobody needs to hear of it."""
        ...

    @property
    def left(self) -> int:
        """That may still come, as far as is known, besides those that `next` gave."""
        ...


class AllOf:
    """Every sample of every task, the urgent ones first."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._samples = iter([(plan, sample) for plan in ordered for sample in range(plan.task.num_samples)])
        self.left = sum(plan.task.num_samples for plan in ordered)

    def next(self) -> tuple[Plan, int] | None:
        found = next(self._samples, None)
        self.left -= found is not None
        return found

    def ended(self, finished: Finished) -> bool:  # noqa: ARG002
        return True


class LocalRollout:
    """Use as an async context manager."""

    def __init__(self, settings: Settings, data: Path) -> None:
        self._settings = settings
        self._data = data
        self._stack = contextlib.AsyncExitStack()
        self._running: set[Running] = set()
        self._ended: asyncio.Queue[asyncio.Task[Finished] | None] = asyncio.Queue()  # None: look again
        self._changed = asyncio.Event()  # something ended, or was cancelled
        self._cancelled = False
        self._checker = SessionChecker(settings.verify.share)
        self.plane: DataPlane
        self.node: Node

    async def __aenter__(self) -> "LocalRollout":
        async with contextlib.AsyncExitStack() as stack:
            plane = self.plane = await stack.enter_async_context(DataPlane(self._settings, self._data))
            if all(replica.down for replica in plane.pool.replicas):
                urls = ", ".join(replica.url for replica in plane.pool.replicas) or "any address"
                raise ConfigError(f"No engine answers at {urls}: start it, or name another ([engine] urls, --engine).")
            self.node = await stack.enter_async_context(node_of(plane))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def plan(self, tasks: Iterable[TaskRequest]) -> list[Plan]:
        """Raises ConfigError for the first one that can't be run here, before any is."""
        return [await self.node.plan(task) for task in tasks]

    async def run(self, wanted: Iterable[Plan] | Wanted) -> AsyncIterator[Finished]:
        """Every sample of every task (or whatever is wanted), each as soon as it has ended. Those that run when nobody
        reads on any more are cancelled."""
        chosen = AllOf(wanted) if isinstance(wanted, Iterable) else wanted
        self._cancelled = False
        feeding = asyncio.get_running_loop().create_task(self._feed(chosen))
        try:
            while not feeding.done() or self._running or not self._ended.empty():
                finished = await self._ended.get()
                if finished is not None:
                    yield finished.result()
            await feeding
        finally:
            self.cancel()
            feeding.cancel()
            await asyncio.wait({feeding, *(running.finished for running in self._running)})

    async def _feed(self, wanted: Wanted) -> None:
        try:
            while not self._cancelled and (wanted.left or self._running):
                await self.node.room()
                self._changed.clear()
                found = None if self._cancelled else wanted.next()
                if found is not None:
                    running = await self.node.submit(*found)
                    self._running.add(running)
                    running.finished.add_done_callback(partial(self._over, running, wanted))
                    if self._cancelled:  # meanwhile
                        running.cancel()
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._changed.wait()
        finally:
            self._ended.put_nowait(None)

    def _over(self, running: Running, wanted: Wanted, task: asyncio.Task[Finished]) -> None:
        self._running.discard(running)
        broken = task.cancelled() or task.exception() is not None  # who reads it hears why
        if broken or wanted.ended(task.result()) or self._cancelled:
            self._ended.put_nowait(task)
        self._changed.set()
        self._ended.put_nowait(None)

    def cancel(self) -> None:
        """Those that run end as cancelled, and those that have not begun never do."""
        self._cancelled = True
        for running in self._running:
            running.cancel()
        self._changed.set()
        self._ended.put_nowait(None)

    @property
    def running(self) -> int:
        return len(self._running)

    def used(self) -> Used:
        """What all sessions used so far."""
        return self.node.used()

    def load(self) -> Load:
        return self.node.load()

    async def result(self, plan: Plan, finished: Finished) -> dict[str, Any]:
        """The session as trainers read it (models.SessionResult); held back where it fails the check."""
        store = self.plane.store
        session = await store.session(finished.session_id)
        assert session is not None
        exchanges = [exchange async for exchange in store.exchanges(finished.session_id)]

        def made() -> dict[str, Any]:
            builder, error = plan.task.builder.strategy, finished.error
            try:
                built = build(session, exchanges, builder, self._checker)
                item = Item(session, built.sampled, built.trajectory, exchanges, parts=built.parts)
            except HeldBack as held:
                error = str(held)
                kept, nothing = nothing_of(session, builder, held)
                item = Item(kept, Sampled(session.session_id, []), nothing)
            return session_result(
                item,
                stages=finished.seconds,
                error=error,
                outcome=None if finished.outcome is None else msgspec.to_builtins(finished.outcome),
                detail=finished.verdict.detail,
                mask_traces=plan.task.semantics.mask_traces,
            )

        return await asyncio.to_thread(made)

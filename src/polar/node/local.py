"""Tasks run to their end in this process, without a server: a private gateway, a node, and nothing that listens to
anybody else.

    tasks -> sessions, the urgent ones first -> node -> Finished, as they come
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

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
from polar.trajectory.session import sampled, traced


class LocalRollout:
    """Use as an async context manager."""

    def __init__(self, settings: Settings, data: Path) -> None:
        self._settings = settings
        self._data = data
        self._stack = contextlib.AsyncExitStack()
        self._wanted: deque[tuple[Plan, int]] = deque()  # not taken in yet
        self._running: set[Running] = set()
        self._ended: asyncio.Queue[asyncio.Task[Finished] | None] = asyncio.Queue()  # None: look again
        self.plane: DataPlane
        self.node: Node

    async def __aenter__(self) -> "LocalRollout":
        async with contextlib.AsyncExitStack() as stack:
            plane = self.plane = await stack.enter_async_context(DataPlane(self._settings, self._data))
            if all(replica.down for replica in plane.pool.replicas):
                urls = ", ".join(replica.url for replica in plane.pool.replicas)
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

    async def run(self, plans: list[Plan]) -> AsyncIterator[Finished]:
        """Every sample of every task, each as soon as it has ended. Those that run when nobody reads on any more are
        cancelled."""
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._wanted.extend((plan, sample) for plan in ordered for sample in range(plan.task.num_samples))
        feeding = asyncio.get_running_loop().create_task(self._feed())
        try:
            while self._wanted or self._running or not self._ended.empty():
                finished = await self._ended.get()
                if finished is not None:
                    yield finished.result()
            await feeding
        finally:
            self.cancel()
            feeding.cancel()
            await asyncio.wait({feeding, *(running.finished for running in self._running)})

    async def _feed(self) -> None:
        try:
            while self._wanted:
                await self.node.room()
                if self._wanted:
                    running = await self.node.submit(*self._wanted[0])
                    self._running.add(running)
                    running.finished.add_done_callback(partial(self._over, running))
                    if self._wanted:  # unless all was cancelled meanwhile
                        self._wanted.popleft()
                    else:
                        running.cancel()
        except BaseException:
            self._wanted.clear()
            raise
        finally:
            self._ended.put_nowait(None)

    def _over(self, running: Running, _: object) -> None:
        self._running.discard(running)
        self._ended.put_nowait(running.finished)

    def cancel(self) -> None:
        """Those that run end as cancelled, and those that have not begun never do."""
        self._wanted.clear()
        for running in self._running:
            running.cancel()
        self._ended.put_nowait(None)

    def load(self) -> Load:
        return self.node.load()

    async def result(self, plan: Plan, finished: Finished) -> dict[str, Any]:
        """The session as trainers read it (models.SessionResult)."""
        store = self.plane.store
        session = await store.session(finished.session_id)
        assert session is not None
        exchanges = [exchange async for exchange in store.exchanges(finished.session_id)]

        def made() -> dict[str, Any]:
            paths = sampled(session, exchanges)
            item = Item(session, paths, traced(paths, plan.task.builder.strategy), exchanges)
            return session_result(
                item,
                stages=finished.seconds,
                error=finished.error,
                outcome=None if finished.outcome is None else msgspec.to_builtins(finished.outcome),
                detail=finished.verdict.detail,
            )

        return await asyncio.to_thread(made)

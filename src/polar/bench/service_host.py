"""Sessions in which nothing happens, for a worker: each is made in the store and ended there, and that is all.

With `turns`, calls are stored as well, as if an agent had made them.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from polar.data_plane import DataPlane
from polar.gateway.session_registry import SessionRegistry
from polar.node.finished_session import FinishedSession
from polar.node.task_plan import TaskPlan
from polar.node.worker import Worker, WorkerContext
from polar.records.exchange import Exchange
from polar.records.session import Session, Verdict
from polar.records.task import TaskRequest
from polar.rollout.protocol import RolloutServer
from polar.store.base import Store

BACKEND = "nothing"
SLOTS = 64


class _Running:
    def __init__(self, finished: "asyncio.Future[FinishedSession]") -> None:
        self.finished = finished

    def cancel(self) -> bool:
        return False


class NoOpHost:
    """worker.Host. A plan is the task itself."""

    def __init__(self, sessions: SessionRegistry, store: Store, calls: Sequence[Exchange] = ()) -> None:
        self._sessions = sessions
        self._store = store
        self._calls = calls
        self._free = SLOTS
        self._freed = asyncio.Event()

    async def plan(self, task: TaskRequest) -> TaskPlan:
        return cast(TaskPlan, task)

    async def wait_for_room(self) -> None:
        while not self._free:
            self._freed.clear()
            await self._freed.wait()

    def free_slots(self) -> int:
        return self._free

    async def submit(self, plan: TaskPlan, sample: int, work_id: int) -> _Running:  # noqa: ARG002 - it is nobody's session
        task = cast(TaskRequest, plan)
        self._free -= 1
        session, _ = await self._sessions.create({"task_id": task.task_id, "sample": sample}, task.run)
        return _Running(asyncio.ensure_future(self._live(session, task, sample)))

    async def _live(self, session: Session, task: TaskRequest, sample: int) -> FinishedSession:
        verdict = Verdict(1.0)
        for call in self._calls:
            own = {"session_id": session.session_id, "exchange_id": f"{session.session_id}-{call.seq}"}
            await self._store.append(msgspec.structs.replace(call, **own))
        await self._sessions.end(session.session_id, verdict)
        self._free += 1
        self._freed.set()
        return FinishedSession(
            session.session_id, task.task_id, sample, verdict, {"run": 0.0}, Path(), turns=len(self._calls)
        )


def make_no_op_worker(
    server: RolloutServer, plane: DataPlane, store_id: str, name: str, calls: Sequence[Exchange] = ()
) -> Worker:
    place = WorkerContext(
        node_id=name,
        name=name,
        backends=[BACKEND],
        slots=SLOTS,
        store=store_id,
        replaces=[],
        load=dict,
        apply_engines=plane.pools.apply,
        export_session=plane.store.export_session,
        disown_session=plane.store.revoke_session_reward,
    )
    return Worker(server, NoOpHost(plane.sessions, plane.store, calls), place)


def make_no_op_task(task_id: str, text: str = "Do nothing.") -> TaskRequest:
    return TaskRequest.model_validate({"task_id": task_id, "instruction": text, "runtime": {"backend": BACKEND}})

"""A node that joins a rollout server over HTTP, and in whose sessions nothing happens.

    python -m benchmarks.service.worker SERVER_URL NAME DATA_DIR [STORE_URL]

A session is made in the store and ended there; with `calls`, these are stored as well, as if an agent had made them.
Without the server's own store, the node sends the server a copy of each session. It prints the server's address when it
works, and ends with its input.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from benchmarks.process import Address, print_message, run_async, wait_for_input_end
from polar.config import GatewaySettings, NodeSettings, ServerSettings, Settings, StoreSettings
from polar.gateway.data_plane import DataPlane
from polar.gateway.process import tune_process
from polar.gateway.session_registry import SessionRegistry
from polar.node.finished_session import FinishedSession
from polar.node.remote_server import RemoteServer
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

    def count_free_slots(self) -> int:
        return self._free

    async def submit(self, plan: TaskPlan, sample: int, work_id: int) -> _Running:  # noqa: ARG002 - it is nobody's session
        task = cast(TaskRequest, plan)
        self._free -= 1
        session, _ = await self._sessions.create({"task_id": task.task_id, "sample": sample}, task.run)
        return _Running(asyncio.ensure_future(self._run_session(session, task, sample)))

    async def _run_session(self, session: Session, task: TaskRequest, sample: int) -> FinishedSession:
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
        get_load=dict,
        apply_engines=plane.pools.apply,
        export_session=plane.store.export_session,
        disown_session=plane.store.revoke_session_reward,
    )
    return Worker(server, NoOpHost(plane.sessions, plane.store, calls), place)


def make_no_op_task(task_id: str, text: str = "Do nothing.") -> TaskRequest:
    return TaskRequest.model_validate({"task_id": task_id, "instruction": text, "runtime": {"backend": BACKEND}})


def build_settings(store: str | None) -> Settings:
    return Settings(
        gateway=GatewaySettings(port=0),
        server=ServerSettings(port=0),
        store=StoreSettings(url=store),
        node=NodeSettings(init_workers=SLOTS, ready_buffer=SLOTS, run_workers=SLOTS, postrun_workers=SLOTS),
    )


@contextlib.asynccontextmanager
async def run_worker(worker: Worker) -> AsyncIterator[None]:
    """Until the end of the block, which is at once where the worker fails."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(stop))
        yield
        stop.set()


async def serve(server_url: str, name: str, data: Path, store: str | None) -> None:
    tune_process()
    async with (
        RemoteServer(server_url, None) as server,
        DataPlane(build_settings(store), data, engines=False) as plane,
        run_worker(make_no_op_worker(server, plane, await plane.store.ensure_store_id(), name)),
    ):
        print_message(Address(server_url))
        await wait_for_input_end()


if __name__ == "__main__":
    run_async(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None))

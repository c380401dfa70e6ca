"""Machines, and the nodes on them: the production Worker, with a host in which time passes instead of work."""

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from polar.engines.base import DesiredEngines
from polar.errors import ConfigError, StoreError
from polar.node.finished_session import FinishedSession
from polar.node.worker import Worker, WorkerContext
from polar.records.session import Verdict
from polar.records.task import TaskRequest
from polar.rollout.protocol import RolloutServer
from polar.runtimes.base import SandboxError
from tests.simulation.loop import Process
from tests.simulation.network import RemoteServer
from tests.simulation.schedule import REASONS, Machine, Task

if TYPE_CHECKING:
    from tests.simulation.world import World

_AHEAD = 1  # sessions that a host takes in besides those that it runs
_STORE = "the server's"


class Session(Struct):
    """What a host knows of a session that it ran."""

    session_id: str
    node_id: str
    task: tuple[str, str]
    sample: int
    began: float
    own_store: bool
    verdict: Verdict | None = None  # None until it has ended


class _Plan(Struct):
    task: TaskRequest


class _Running:
    def __init__(self, finished: "asyncio.Task[FinishedSession]") -> None:
        self.finished = finished
        self.cancelled = asyncio.Event()

    def cancel(self) -> bool:
        self.cancelled.set()
        return True


class Host:
    """Runs sessions (worker.Host): some wait, some run, and each ends with a verdict, whatever happens."""

    def __init__(self, node: "Node", world: "World", slots: int, rng: random.Random) -> None:
        self._node = node
        self._world = world
        self._most = slots + _AHEAD
        self._slots = asyncio.Semaphore(slots)
        self._rng = rng
        self._less = asyncio.Event()
        self.busy = 0

    def _task(self, request: TaskRequest) -> Task:
        return self._world.tasks[request.run, request.task_id]

    async def plan(self, task: TaskRequest) -> Any:
        await asyncio.sleep(self._rng.uniform(0, 0.05))
        if self._task(task).not_runnable:
            raise ConfigError("There is no such harness.")
        if self._rng.random() < self._flaky():
            raise SandboxError("The runtime does not answer.")
        return _Plan(task)

    def _flaky(self) -> float:
        return self._world.schedule.flaky_hosts if self._world.troubled else 0.0

    async def wait_for_room(self) -> None:
        while self.busy >= self._most:
            self._less.clear()
            await self._less.wait()

    def count_free_slots(self) -> int:
        return max(0, self._most - self.busy)

    async def submit(self, plan: Any, sample: int, work_id: int) -> Any:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        fate = self._rng.random()
        if fate < self._flaky():
            raise StoreError("The disk is full.") if fate < self._flaky() / 2 else OSError("No file descriptors.")
        self.busy += 1
        session = self._world.began(self._node, (plan.task.run, plan.task.task_id), sample)
        running = _Running(asyncio.current_task())  # type: ignore[arg-type]
        running.finished = asyncio.get_running_loop().create_task(self._live(self._task(plan.task), session, running))
        return running

    async def _live(self, task: Task, session: Session, running: _Running) -> FinishedSession:
        oldest = self._version()
        cancelled = asyncio.ensure_future(running.cancelled.wait())
        work = asyncio.ensure_future(self._run(task))
        await asyncio.wait({cancelled, work}, return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if work.done():
            verdict = work.result()
        else:
            work.cancel()
            verdict = Verdict(reason="cancelled")
        await asyncio.sleep(self._rng.uniform(0, 0.2))  # it is torn down
        self.busy -= 1
        self._less.set()
        session.verdict = verdict
        self._world.note(self._node.node_id, f"{session.session_id} ends: {verdict.reward} {verdict.reason}")
        versions = oldest, self._version()
        return FinishedSession(
            session.session_id, task.request.task_id, session.sample, verdict, {}, Path(), versions=versions
        )

    def _version(self) -> int:
        pools = self._node.engines.pools
        return pools["default"].replicas[0].version if pools else 0

    async def _run(self, task: Task) -> Verdict:
        await asyncio.sleep(self._rng.uniform(0, 0.5))  # INIT
        async with self._slots:
            await asyncio.sleep(task.seconds * self._rng.uniform(0.2, 2))  # RUN
            if task.poison:
                self._world.died(self._node)
                await asyncio.Event().wait()
        await asyncio.sleep(self._rng.uniform(0, 0.3))  # POSTRUN
        if self._rng.random() < task.fails:
            return Verdict(reason=self._rng.choice(REASONS))
        return Verdict(reward=float(self._rng.randint(0, 3)))


class Node:
    """One start of the worker on a machine."""

    def __init__(self, world: "World", machine: "MachineState", number: int, process: Process) -> None:
        self.node_id = f"{machine.spec.name}.{number}"
        self.machine = machine
        self.process = process
        self.engines = DesiredEngines(-1)
        self.stop = asyncio.Event()
        self.drain = asyncio.Event()
        self.host = Host(self, world, machine.spec.slots, world.rng(f"host {self.node_id}"))
        self._world = world
        self._rng = world.rng(self.node_id)
        self.worker: Worker

    async def main(self, server: RolloutServer, replaces: list[str]) -> None:
        spec = self.machine.spec
        place = WorkerContext(
            node_id=self.node_id,
            name=spec.name,
            backends=spec.lanes,
            slots=spec.slots,
            store=f"{spec.name}'s own" if spec.own_store else _STORE,
            replaces=replaces,
            stopped=[node_id for node_id in replaces if node_id in self.machine.told_to_end],
            get_load=dict,
            apply_engines=self._apply,
            export_session=self._export,
            disown_session=self._disown,
            mark_ending=lambda: self.machine.told_to_end.add(self.node_id),
            drain_seconds=3.0,
        )
        try:
            self.worker = self._world.parts.worker(server, self.host, place)
            await self.worker.run(self.stop, self.drain)
        except Exception as error:  # noqa: BLE001 - whatever it was, it should not have been
            self._world.crashed(f"The worker of {self.node_id}", error)
            return
        self._world.left(self)

    async def _disown(self, session_id: str, reason: str) -> None:
        await asyncio.sleep(0.005)
        self._world.disk.disowned.setdefault(session_id, reason)
        self._world.audit.disowned(session_id)

    async def _apply(self, engines: DesiredEngines) -> dict[str, list[str]]:
        if engines.generation >= self.engines.generation:  # as engines.pools has it
            self.engines = engines
            await asyncio.sleep(self._rng.uniform(0, 0.1))
        return {}

    async def _export(self, session_id: str) -> bytes:
        await asyncio.sleep(0.005)
        if self._world.troubled and self._rng.random() < self._world.schedule.flaky_hosts:
            raise StoreError("The disk does not answer.")
        return session_id.encode()


class MachineState:
    """A machine, whose node is started again whenever it is no more."""

    def __init__(self, world: "World", spec: Machine) -> None:
        self.spec = spec
        self.node: Node | None = None
        self._world = world
        self._starts = 0
        self._left: list[str] = []  # nodes that left something here
        self.told_to_end: set[str] = set()  # as its disk says

    @property
    def alive(self) -> bool:
        return self.node is not None and not self.node.process.dead

    def start(self) -> None:
        if self.alive:
            return
        node = self._new(self._world.process(f"{self.spec.name}.{self._starts + 1}"))
        rng = self._world.rng(f"network {node.node_id}")
        server = RemoteServer(self._world.network, node.node_id, rng, self._world.audit.told)
        self._run(node, server)

    def start_inside(self, process: Process, server: RolloutServer) -> None:
        if self.node is not None:
            self._left.append(self.node.node_id)
        self._run(self._new(process), server)

    def _new(self, process: Process) -> Node:
        self._starts += 1
        self.node = Node(self._world, self, self._starts, process)
        return self.node

    def _run(self, node: Node, server: RolloutServer) -> None:
        left, self._left = self._left, []
        self._world.note(node.node_id, f"starts, in place of {left}")
        node.process.spawn(node.main(server, left))

    def kill(self) -> None:
        if self.alive and self.node is not None:
            self._world.note(self.node.node_id, "is killed")
            self.node.process.kill()
            self._left.append(self.node.node_id)

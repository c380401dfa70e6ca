"""A world for one schedule: its processes, from the beginning to the end."""

import asyncio
import gc
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec import Struct

import polar.rollout.queue.queue
from polar.node.worker import Worker
from polar.rollout.runs import Quotas
from polar.rollout.service import RolloutService
from tests.simulation.audit import Audit
from tests.simulation.database import Disk, Troubles
from tests.simulation.faults import Faults
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.machines import MachineState, Node, Session
from tests.simulation.network import Network, Weather
from tests.simulation.rest import undone
from tests.simulation.schedule import Schedule, drawn
from tests.simulation.servers import ServerProcess
from tests.simulation.trainers import Trainer

_PATIENCE = 400.0  # seconds, after all trouble, until everything is done
_PATIENCE_FOR_KILLERS = 300.0  # more of them for each session that kills its nodes
_COLLECTED = 5  # schedules, after which what they left is: while it is few, and still in the processor's cache


class Broken(AssertionError):
    """Something that must hold does not."""


class Parts(Struct):
    """The production code that runs."""

    rollout: Callable[..., Any] = RolloutService
    worker: Callable[..., Any] = Worker


class Clock:
    """In place of the `time` module: the wall clock, which somebody sets."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.ahead = 1.7e9

    def time(self) -> float:
        return self._loop.time() + self.ahead


class World:
    def __init__(self, schedule: Schedule, parts: Parts, say: Callable[[str], None] | None = None) -> None:
        """`say` hears of everything that happens."""
        self.schedule = schedule
        self.parts = parts
        self._say = say
        self.loop = VirtualLoop(self.crashed)
        self.clock = Clock(self.loop)
        self.troubled = True
        self.processes: list[Process] = []
        self.audit = Audit(self)
        self.disk = Disk(self.audit.committed)
        self.troubles = Troubles()
        self.weather = Weather()
        self.network = Network(self.loop, self.weather, self._found, self.crashed)
        self.tasks = {task.name: task for task in schedule.tasks}
        self.killers = sum(task.request.num_samples for task in schedule.tasks if task.poison)
        self.sessions: dict[str, Session] = {}
        self._quotas = {run: [Quotas()] for run in schedule.runs}
        self.servers: list[ServerProcess] = []
        self.address: ServerProcess | None = None
        self.stopped: set[str] = set()  # nodes that were told to end
        self._random = random.Random(schedule.seed)
        self._problem: str | None = None
        self._finished: asyncio.Future[None] = self.loop.create_future()
        self.machines = [MachineState(self, machine) for machine in schedule.machines]
        self._faults = Faults(self)
        self.trainers = {run: Trainer(self, run) for run in schedule.runs}

    def rng(self, name: str) -> random.Random:
        """Everybody has their own, so that what one does changes nobody else's luck."""
        digest = hashlib.blake2b(f"{self.schedule.seed} {name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

    @property
    def says(self) -> bool:
        return self._say is not None

    def note(self, who: str, what: str) -> None:
        if self._say is not None:
            self._say(f"{self.loop.time():9.3f}  {who:18}  {what}")

    def fail(self, problem: str) -> None:
        """The first problem ends the schedule."""
        self.note("PROBLEM", problem)
        if self._problem is None:
            self._problem = problem
            if not self._finished.done():
                self._finished.set_result(None)

    def crashed(self, who: str, error: object) -> None:
        """Somebody raises what nobody may."""
        self.fail(f"{who} crashes: {error!r}")

    def process(self, name: str) -> Process:
        process = Process(self.loop, name)
        self.processes.append(process)
        return process

    # Servers

    def _found(self) -> ServerProcess | None:
        """Whoever has the address; one that was replaced still has open connections."""
        older = [one for one in self.servers if one.ready and not one.process.dead and one is not self.address]
        if older and not older[-1].process.frozen and self._random.random() < 0.3:
            return older[-1]
        return self.address

    def start_server(self) -> None:
        server = ServerProcess(self, len(self.servers) + 1)
        self.servers.append(server)
        self.note(server.name, "starts")
        server.process.spawn(server.main())

    def took_over(self, server: ServerProcess) -> None:
        self.note(server.name, "listens")
        old = self.address
        if old is None or old.process.dead or server.rollout._database.epoch > old.rollout._database.epoch:
            self.address = server

    def ended(self, server: ServerProcess) -> None:
        """It ends itself, or is killed; unless another one is there, it is started again."""
        if not server.process.dead:
            server.process.kill()
            self.network.reset(server.calls)
            self.loop.later(self._random.uniform(0.1, 2), self._start_missing)

    def _start_missing(self) -> None:
        if all(server.process.dead for server in self.servers):
            self.start_server()

    # Nodes

    def began(self, node: Node, task: tuple[str, str], sample: int) -> Session:
        session_id = f"session-{len(self.sessions) + 1}"
        own = node.machine.spec.own_store
        session = self.sessions[session_id] = Session(session_id, node.node_id, task, sample, self.loop.time(), own)
        self.note(node.node_id, f"{session_id} begins: {task[1]}/{sample}")
        return session

    def died(self, node: Node) -> None:
        """Its process, by whatever cause."""
        if node.machine.spec.inside:
            server = next((one for one in self.servers if one.process is node.process), None)
            if server is not None:
                self.note(node.node_id, "takes the server with it")
                self.ended(server)
        elif node.machine.node is node and node.machine.alive:
            node.machine.kill()
            self.loop.later(self._random.uniform(0.1, 3), node.machine.start)

    def check_interrupted(self, session: Session) -> None:
        """Only a node that was told to end breaks sessions off."""
        if session.node_id not in self.stopped:
            self.fail(f"{session} was broken off, and nobody told its node to end.")

    def left(self, node: Node) -> None:
        """It ended in order."""
        self.note(node.node_id, "has left")
        if not (node.stop.is_set() or node.drain.is_set() or node.worker._draining.is_set()):
            self.fail(f"{node.node_id} ends, and nobody asked it to.")
        if not node.machine.spec.inside:
            node.process.kill()
            self.loop.later(self._random.uniform(0.1, 3), node.machine.start)

    # Trainers

    def quotas(self, run: str) -> list[Quotas]:
        """Those that may be in force."""
        return self._quotas[run]

    def may_be(self, run: str, quotas: Quotas) -> None:
        self._quotas[run] = [*self._quotas[run], quotas]

    def is_now(self, run: str, quotas: Quotas) -> None:
        self.note(f"trainer-{run}", f"has set {quotas}")
        self._quotas[run] = [quotas]

    # From the beginning to the end

    def run(self) -> None:
        """Raises Broken."""
        with self._watched():
            try:
                self.loop.run_until_complete(self._run())
            except AssertionError as error:
                self.fail(str(error))
            finally:
                self.loop.end(self.processes)
        if self._problem is not None:
            raise Broken(f"seed {self.schedule.seed}: {self._problem}")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        handler = _Errors(self)
        root = logging.getLogger("polar")
        root.addHandler(handler)
        propagates, root.propagate = root.propagate, False
        level = root.level
        root.setLevel(logging.DEBUG if self._say is not None else logging.ERROR)
        try:
            with mock.patch.object(polar.rollout.queue.queue, "time", self.clock):
                yield
        finally:
            root.removeHandler(handler)
            root.propagate = propagates
            root.setLevel(level)

    async def _run(self) -> None:
        for trainer in self.trainers.values():
            trainer.start()
        self.start_server()
        for machine in self.machines:
            if not machine.spec.inside:
                machine.start()
        rng = self.rng("faults")
        for fault in self.schedule.faults:
            self.loop.call_at(fault.at, self._faults.strike, fault, rng, context=self.loop.nobody)
        try:
            async with asyncio.timeout(self.schedule.ends):
                await asyncio.shield(self._finished)
            return
        except TimeoutError:
            self.note("WORLD", "all goes well from here on")
            self._faults.end()
        deadline = self.loop.time() + _PATIENCE + _PATIENCE_FOR_KILLERS * self.killers
        while not self._finished.done() and (left := undone(self)):
            if self.loop.time() > deadline:
                self.fail(f"It does not come to an end: {left}")
                return
            await asyncio.sleep(0.5)


class _Errors(logging.Handler):
    """What production code logs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(record.name.removeprefix("polar."), record.getMessage())


def simulate(seed: int, parts: Parts | None = None, say: Callable[[str], None] | None = None) -> float:
    """Runs the schedule of this seed; raises Broken. The seconds that passed in it."""
    world = World(drawn(seed), parts or Parts(), say)
    world.run()
    return world.loop.time()


def outcomes(seeds: Iterable[int], parts: Parts | None = None) -> Iterator[str | None]:
    """Of each of them: None where all is well."""
    with _no_collector():
        for number, seed in enumerate(seeds):
            try:
                simulate(seed, parts)
            except Broken as error:
                yield str(error)
            else:
                yield None
            if number % _COLLECTED == 0:
                gc.collect()


def problems(seeds: Iterable[int], parts: Parts | None = None) -> Iterator[str]:
    return (problem for problem in outcomes(seeds, parts) if problem is not None)


@contextmanager
def _no_collector() -> Iterator[None]:
    """A world is full of cycles, and short."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()

"""A world for one schedule: its processes, what goes wrong in it, and what must be so when all is done."""

import asyncio
import gc
import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec import Struct

import polar.rollout.queue
from polar.node.worker import Worker
from polar.rollout.queue import Counts, Totals
from polar.rollout.rollout import Rollout
from polar.rollout.runs import Quotas
from tests.simulation.audit import Audit
from tests.simulation.database import Disk, Troubles
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.machines import MachineState, Node, Session
from tests.simulation.network import Network, Weather
from tests.simulation.schedule import Fault, Schedule, drawn
from tests.simulation.servers import ServerProcess
from tests.simulation.trainers import Trainer

_PATIENCE = 400.0  # seconds, after all trouble, until everything is done


class Broken(AssertionError):
    """Something that must hold does not."""


class Parts(Struct):
    """The production code that runs."""

    rollout: Callable[..., Any] = Rollout
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
        self.loop = VirtualLoop(self.fail)
        self.clock = Clock(self.loop)
        self.troubled = True
        self._processes: list[Process] = []
        self.audit = Audit(self)
        self.disk = Disk(self.audit.committed)
        self.troubles = Troubles()
        self.weather = Weather()
        self.network = Network(self.loop, self.weather, self._found)
        self.tasks = {task.name: task for task in schedule.tasks}
        self.poisoned = any(task.poison for task in schedule.tasks)
        self.sessions: dict[str, Session] = {}
        self._quotas = {run: [Quotas()] for run in schedule.runs}
        self._servers: list[ServerProcess] = []
        self._address: ServerProcess | None = None
        self._stopped: set[str] = set()  # nodes that were told to end
        self._random = random.Random(schedule.seed)
        self._problem: str | None = None
        self._finished: asyncio.Future[None] = self.loop.create_future()
        self.machines = [MachineState(self, machine) for machine in schedule.machines]
        self.trainers = {run: Trainer(self, run) for run in schedule.runs}

    def rng(self, name: str) -> random.Random:
        """Everybody has their own, so that what one does changes nobody else's luck."""
        digest = hashlib.blake2b(f"{self.schedule.seed} {name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

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

    def process(self, name: str) -> Process:
        process = Process(self.loop, name)
        self._processes.append(process)
        return process

    # Servers

    def _found(self) -> ServerProcess | None:
        """Whoever has the address; one that was replaced still has open connections."""
        older = [one for one in self._servers if one.ready and not one.process.dead and one is not self._address]
        if older and not older[-1].process.frozen and self._random.random() < 0.3:
            return older[-1]
        return self._address

    def start_server(self) -> None:
        server = ServerProcess(self, len(self._servers) + 1)
        self._servers.append(server)
        self.note(server.name, "starts")
        server.process.spawn(server.main())

    def took_over(self, server: ServerProcess) -> None:
        self.note(server.name, "listens")
        old = self._address
        if old is None or old.process.dead or server.rollout._queue.epoch > old.rollout._queue.epoch:
            self._address = server

    def ended(self, server: ServerProcess) -> None:
        """It ends itself, or is killed; unless another one is there, it is started again."""
        if not server.process.dead:
            server.process.kill()
            self.network.reset(server.calls)
            self.loop.later(self._random.uniform(0.1, 2), self._start_missing)

    def _start_missing(self) -> None:
        if all(server.process.dead for server in self._servers):
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
            server = next((one for one in self._servers if one.process is node.process), None)
            if server is not None:
                self.note(node.node_id, "takes the server with it")
                self.ended(server)
        elif node.machine.node is node and node.machine.alive:
            node.machine.kill()
            self.loop.later(self._random.uniform(0.1, 3), node.machine.start)

    def check_interrupted(self, session: Session) -> None:
        """Only a node that was told to end breaks sessions off."""
        if session.node_id not in self._stopped:
            self.fail(f"{session} was broken off, and nobody told its node to end.")

    def left(self, node: Node) -> None:
        """It ended in order."""
        self.note(node.node_id, "has left")
        if not (node.stop.is_set() or node.worker._draining.is_set()):
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

    # What goes wrong

    def _strike(self, fault: Fault, rng: random.Random) -> None:
        if self.troubled:
            self.note("FAULT", f"{fault.kind} for {fault.seconds:.1f} s")
            getattr(self, f"_{fault.kind}")(fault.seconds, rng)

    def _kill_server(self, seconds: float, rng: random.Random) -> None:
        if self._address is not None:
            self.ended(self._address)

    def _replace_server(self, seconds: float, rng: random.Random) -> None:
        old = self._address
        if old is not None and not old.process.dead:
            old.process.freeze()
            self.start_server()
            self.loop.later(seconds, self._thaw, old.process)

    def _freeze_server(self, seconds: float, rng: random.Random) -> None:
        if self._address is not None:
            self._freeze(self._address.process, seconds)

    def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        self.loop.later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.frozen and not process.dead:
            self.note(process.name, "goes on")
            process.thaw()

    def _some_node(self, rng: random.Random) -> Node | None:
        machine = rng.choice(self.machines)
        return machine.node if machine.alive else None

    def _kill_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None:
            self.died(node)

    def _freeze_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None:
            self.note(node.node_id, "stands still")
            self._freeze(node.process, seconds)

    def _stop_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None and not node.machine.spec.inside:
            self.note(node.node_id, "is to end")
            self._stopped.add(node.node_id)
            node.process.soon(node.stop.set)

    def _drain_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        server = self._address
        if node is not None and not node.machine.spec.inside and server is not None and not server.process.dead:
            server.process.soon(lambda: self.loop.create_task(server.rollout.leasing.drain(node.node_id)))

    def _cut_off(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        whom = f"trainer-{rng.choice(self.schedule.runs)}" if node is None or rng.random() < 0.2 else node.node_id
        self.note(whom, "is cut off")
        self.weather.cut.add(whom)
        self.loop.later(seconds, self.weather.cut.discard, whom)

    def _bad_network(self, seconds: float, rng: random.Random) -> None:
        self.weather.loses = rng.choice((0.0, 0.1, 0.3))
        self.weather.loses_answers = rng.choice((0.1, 0.3))
        self.weather.repeats = rng.choice((0.0, 0.3))
        self.weather.slow = rng.choice((1, 10, 50))
        self.loop.later(seconds, self._good_network)

    def _good_network(self) -> None:
        self.weather.loses = self.weather.loses_answers = self.weather.repeats = 0.0
        self.weather.slow = 1.0

    def _bad_database(self, seconds: float, rng: random.Random) -> None:
        self.troubles.fails = rng.choice((0.0, 0.1, 0.5, 1.0))
        self.troubles.runs_twice = rng.choice((0.0, 0.2))
        self.troubles.fails_behind = rng.choice((0.0, 0.2))
        self.troubles.slow = rng.choice((1, 20, 100))
        self.loop.later(seconds, self._good_database)

    def _good_database(self) -> None:
        self.troubles.fails = self.troubles.runs_twice = self.troubles.fails_behind = 0.0
        self.troubles.slow = 1.0

    def _set_clock(self, seconds: float, rng: random.Random) -> None:
        self.clock.ahead += rng.choice((-1, 1)) * rng.choice((1.0, 3600.0, 1e8))

    def _kill_trainer(self, seconds: float, rng: random.Random) -> None:
        trainer = self.trainers[rng.choice(self.schedule.runs)]
        if not trainer.process.dead:
            trainer.process.kill()
            self.loop.later(seconds, trainer.start)

    # From the beginning to the end

    def run(self) -> None:
        """Raises Broken."""
        with self._watched():
            try:
                self.loop.run_until_complete(self._run())
            except AssertionError as error:
                self.fail(str(error))
            finally:
                self.loop.end(self._processes)
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
            with mock.patch.object(polar.rollout.queue, "time", self.clock):
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
            self.loop.call_at(fault.at, self._strike, fault, rng, context=self.loop.nobody)
        try:
            async with asyncio.timeout(self.schedule.ends):
                await asyncio.shield(self._finished)
            return
        except TimeoutError:
            self._calm()
        deadline = self.loop.time() + _PATIENCE
        while not self._finished.done() and (left := self._undone()):
            if self.loop.time() > deadline:
                self.fail(f"It does not come to an end: {left}")
                return
            await asyncio.sleep(1.0)

    def _calm(self) -> None:
        self.note("WORLD", "all goes well from here on")
        self.troubled = False
        self._good_network()
        self._good_database()
        self.weather.cut.clear()
        for process in self._processes:
            self._thaw(process)

    def _undone(self) -> str | None:
        """What is not yet as it must be in the end."""
        audit = self.audit
        for trainer in self.trainers.values():
            if trainer.process.dead:
                return "a trainer is dead"
            notes = trainer.notes
            mine = {task.request.task_id for task in self.schedule.tasks if task.request.run == trainer.run}
            if notes.accepted != mine:
                return f"tasks are not accepted: {mine - notes.accepted}"
            wanted = {task.request.task_id for task in self.schedule.tasks if task.cancel_at is not None} & mine
            if notes.cancelled != wanted:
                return f"tasks are not cancelled: {wanted - notes.cancelled}"
            if trainer.run == "default" and self.schedule.steers and not notes.steered:
                return "the trainer steers"
            if trainer.run in self.schedule.quotas and not notes.limited:
                return "the trainer changes its quotas"
            rows = [work for work in audit.work.values() if work.run == trainer.run]
            if not all(work.state == "done" for work in rows) or len({work.task_id for work in rows}) != len(mine):
                return f"work is not done: {[work for work in rows if work.state != 'done']}"
            done = [(work.task_id, work.sample) for work in sorted(rows, key=lambda work: work.cursor or 0)]
            if notes.seen != done:
                if notes.seen != done[: len(notes.seen)]:
                    self.fail(f"A follower saw {notes.seen} of {done}.")
                return f"a follower saw {len(notes.seen)} of {len(done)} results"
            ended = sorted((task for task in audit.tasks.values() if task.run == trainer.run), key=_cursor)
            if notes.groups != [task.task_id for task in ended]:
                return f"a follower saw {notes.groups} of {ended}"
        return self._unsettled()

    def _unsettled(self) -> str | None:
        """What of the processes' memory is not as the database has it."""
        server = self._address
        if server is None or server.process.dead or not server.ready:
            return "there is no server"
        if any(not one.process.dead for one in self._servers if one is not server):
            return "a server that was replaced is still there"
        rollout = server.rollout
        if any(counts != Counts() for counts in rollout.ledger.lanes.values()):
            return f"the ledger has {rollout.ledger.lanes}"
        totals = {run: rollout.ledger.totals[run] for run in self.schedule.runs}
        tasks = self.audit.tasks.values()
        for run, total in totals.items():
            mine = [task for task in tasks if task.run == run]
            found = Totals(len(mine), sum(task.ended for task in mine), sum(task.usable for task in mine))
            if total != found:
                return f"the ledger has {total} of {run}, and there is {found}"
            if run in self.schedule.quotas:
                if rollout.quotas().get(run) != self.schedule.quotas[run]:
                    self.fail(f"The quotas of {run} are {rollout.quotas().get(run)}.")
                if self.schedule.quotas[run].ahead is not None and rollout.ledger.untaken[run]:
                    return f"{rollout.ledger.untaken[run]} sessions of {run} seem to wait for the trainer"
        engines = rollout.steering.engines
        steering = self.trainers["default"].notes
        if self.schedule.steers and engines.pools["default"].replicas[0].version < steering.version:
            self.fail(f"The version is {engines.pools['default']}, and {steering.version} was set.")
        if engines.pools["default"].paused is not None:
            self.fail("Generation stands still, and it was resumed.")
        members = rollout.leasing.members
        nodes = [machine.node for machine in self.machines if machine.node is not None and machine.alive]
        if len(nodes) != len(self.machines) or members.keys() != {node.node_id for node in nodes}:
            return f"the members are {list(members)}"
        for node in nodes:
            if members[node.node_id].leases or members[node.node_id].cancelled:
                return f"{node.node_id} has {members[node.node_id].leases} in the server's memory"
            if node.worker._held or node.worker._outbox or node.host.busy:
                return f"{node.node_id} still holds something"
            if node.engines != engines or members[node.node_id].applied != engines.generation:
                return f"{node.node_id} has engines {node.engines}"
        return None


def _cursor(task: Any) -> int:
    return task.cursor or 0


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


def problems(first: int, count: int, parts: Parts | None = None) -> Iterator[str]:
    """Of so many seeds."""
    with _no_collector():
        for seed in range(first, first + count):
            try:
                simulate(seed, parts)
            except Broken as error:
                yield str(error)
            if seed % 50 == 0:
                gc.collect()


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

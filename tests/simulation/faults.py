"""What goes wrong in a world: a method for each kind of fault that a schedule can have."""

import random
from typing import TYPE_CHECKING

from tests.simulation.loop import Process
from tests.simulation.schedule import Fault

if TYPE_CHECKING:
    from tests.simulation.machines import Node
    from tests.simulation.world import World


class Faults:
    def __init__(self, world: "World") -> None:
        self._world = world

    def end(self) -> None:
        """All goes well from here on."""
        self._world.troubled = False
        self._good_network()
        self._good_database()
        self._world.weather.cut.clear()
        for process in self._world.processes:
            self._thaw(process)

    def strike(self, fault: Fault, rng: random.Random) -> None:
        if self._world.troubled:
            self._world.note("FAULT", f"{fault.kind} for {fault.seconds:.1f} s")
            getattr(self, f"_{fault.kind}")(fault.seconds, rng)

    def _kill_server(self, seconds: float, rng: random.Random) -> None:
        if self._world.address is not None:
            self._world.ended(self._world.address)

    def _replace_server(self, seconds: float, rng: random.Random) -> None:
        old = self._world.address
        if old is not None and not old.process.dead:
            old.process.freeze()
            self._world.start_server()
            self._world.loop.later(seconds, self._thaw, old.process)

    def _freeze_server(self, seconds: float, rng: random.Random) -> None:
        if self._world.address is not None:
            self._freeze(self._world.address.process, seconds)

    def _freeze(self, process: Process, seconds: float) -> None:
        process.freeze()
        self._world.loop.later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.frozen and not process.dead:
            self._world.note(process.name, "goes on")
            process.thaw()

    def _some_node(self, rng: random.Random) -> "Node | None":
        machine = rng.choice(self._world.machines)
        return machine.node if machine.alive else None

    def _kill_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None:
            self._world.died(node)

    def _freeze_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None:
            self._world.note(node.node_id, "stands still")
            self._freeze(node.process, seconds)

    def _stop_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None and not node.machine.spec.inside:
            self._world.note(node.node_id, "is to end")
            self._world.stopped.add(node.node_id)
            node.process.soon(node.stop.set)

    def _preempt_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        if node is not None and not node.machine.spec.inside:
            self._world.note(node.node_id, "is preempted")
            self._world.stopped.add(node.node_id)
            node.process.soon(node.drain.set)
            self._world.loop.later(seconds, self._kill_preempted, node)

    def _kill_preempted(self, node: "Node") -> None:
        if not node.process.dead:
            self._world.died(node)

    def _drain_node(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        server = self._world.address
        if node is not None and not node.machine.spec.inside and server is not None and not server.process.dead:
            server.process.soon(lambda: self._world.loop.create_task(server.rollout.lease_manager.drain(node.node_id)))

    def _cut_off(self, seconds: float, rng: random.Random) -> None:
        node = self._some_node(rng)
        whom = (
            f"trainer-{rng.choice(self._world.schedule.runs)}" if node is None or rng.random() < 0.2 else node.node_id
        )
        self._world.note(whom, "is cut off")
        self._world.weather.cut.add(whom)
        self._world.loop.later(seconds, self._world.weather.cut.discard, whom)

    def _bad_network(self, seconds: float, rng: random.Random) -> None:
        self._world.weather.loses = rng.choice((0.0, 0.1, 0.3))
        self._world.weather.loses_answers = rng.choice((0.1, 0.3))
        self._world.weather.repeats = rng.choice((0.0, 0.3))
        self._world.weather.slow = rng.choice((1, 10, 50))
        self._world.loop.later(seconds, self._good_network)

    def _good_network(self) -> None:
        self._world.weather.loses = self._world.weather.loses_answers = self._world.weather.repeats = 0.0
        self._world.weather.slow = 1.0

    def _bad_database(self, seconds: float, rng: random.Random) -> None:
        self._world.troubles.fails = rng.choice((0.0, 0.1, 0.5, 1.0))
        self._world.troubles.runs_twice = rng.choice((0.0, 0.2))
        self._world.troubles.fails_behind = rng.choice((0.0, 0.2))
        self._world.troubles.slow = rng.choice((1, 20, 100))
        self._world.loop.later(seconds, self._good_database)

    def _good_database(self) -> None:
        self._world.troubles.fails = self._world.troubles.runs_twice = self._world.troubles.fails_behind = 0.0
        self._world.troubles.slow = 1.0

    def _set_clock(self, seconds: float, rng: random.Random) -> None:
        self._world.clock.ahead += rng.choice((-1, 1)) * rng.choice((1.0, 3600.0, 1e8))

    def _kill_trainer(self, seconds: float, rng: random.Random) -> None:
        trainer = self._world.trainers[rng.choice(self._world.schedule.runs)]
        if not trainer.process.dead:
            trainer.process.kill()
            self._world.loop.later(seconds, trainer.start)

"""Trainers: each has one run, submits its tasks, follows its results, and steers. They can die and go on."""

import asyncio
import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from polar.rollout.engine_controller import EngineController, NotAppliedYet
from polar.rollout.protocol import ServerUnreachable
from polar.rollout.queue.records import TaskRow, WorkRow
from polar.rollout.runs import Quotas
from polar.rollout.service import RefusedTask
from tests.simulation.loop import Process
from tests.simulation.schedule import Task

if TYPE_CHECKING:
    from tests.simulation.servers import ServerProcess
    from tests.simulation.world import World

_CONSUMER = "trainer"
_ANOTHER = "http://another-engine"
_SECONDS = 15.0  # that nodes have to apply something
_RNG: ContextVar[random.Random] = ContextVar("rng")  # each of a trainer's tasks has its own


class Notes:
    """What a trainer keeps, whatever happens to it."""

    def __init__(self) -> None:
        self.cursor = self.group_cursor = 0
        self.seen: list[tuple[str, int]] = []
        self.groups: list[str] = []
        self.accepted: set[str] = set()
        self.cancelled: set[str] = set()
        self.version = 0  # that the server has confirmed
        self.steered = False
        self.limited = False


class Trainer:
    def __init__(self, world: "World", run: str) -> None:
        self.run = run
        self.notes = Notes()
        self.process: Process
        self._world = world
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        name = f"trainer-{self.run}.{self._starts}"
        self.process = self._world.process(name)
        for work in (self._submit_all, self._follow, self._follow_groups, self._cancel_some, self._steer):
            self.process.spawn(self._watched(work, self._world.rng(f"{name} {work.__name__}")))

    @property
    def _rng(self) -> random.Random:
        return _RNG.get()

    async def _watched(self, work: Any, rng: random.Random) -> None:
        _RNG.set(rng)
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - nothing may be raised but what is expected
            self._world.crashed(f"The trainer of {self.run} ({work.__name__})", error)

    async def _call(self, work: Any, *, repeats: bool = False) -> Any:
        """Until the server answers."""
        while True:
            try:
                return await self._world.network.call(f"trainer-{self.run}", self._rng, work, repeats=repeats)
            except ServerUnreachable:
                await asyncio.sleep(self._rng.uniform(0.05, 1))

    async def _until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))

    # Tasks

    async def _submit_all(self) -> None:
        quotas = self._world.schedule.quotas.get(self.run)
        if quotas is not None:
            await self._limit(quotas)
            self.process.spawn(self._watched(self._change_quotas, self._rng))
        mine = [task for task in self._world.schedule.tasks if task.request.run == self.run]
        await asyncio.gather(*(self._submit(task) for task in mine))

    async def _submit(self, task: Task) -> None:
        await self._until(task.at)
        for _ in range(2 if self._rng.random() < 0.2 else 1):  # some say it twice
            while True:
                (answer,) = await self._call(lambda server: server.rollout.submit([task.request]), repeats=True)
                if not isinstance(answer, RefusedTask):
                    break
                if answer.code != 429 or self._world.quotas(self.run) == [Quotas()]:
                    self._world.fail(f"{task.name} is refused: {answer.error}")
                    return
                await asyncio.sleep(1)
            self.notes.accepted.add(task.request.task_id)
            self._world.note(f"trainer-{self.run}", f"has submitted {task.request.task_id}")
        if self._rng.random() < 0.1:
            other = task.request.model_copy(update={"instruction": "other"})
            (answer,) = await self._call(lambda server: server.rollout.submit([other]))
            if not isinstance(answer, RefusedTask) or answer.code != 409:
                self._world.fail(f"{task.name} with other content is answered {answer}.")

    async def _cancel_some(self) -> None:
        mine = [task for task in self._world.schedule.tasks if task.request.run == self.run]
        await asyncio.gather(*(self._cancel(task, task.cancel_at) for task in mine if task.cancel_at is not None))

    async def _cancel(self, task: Task, at: float) -> None:
        await self._until(at)
        while task.request.task_id not in self.notes.accepted:  # noqa: ASYNC110 - whoever submitted it may be dead
            await asyncio.sleep(0.5)
        found = await self._call(lambda server: server.rollout.cancel(*task.name), repeats=True)
        if found is None:
            self._world.fail(f"{task.name} was accepted, and is not there when it is cancelled.")
        self.notes.cancelled.add(task.request.task_id)
        self._world.note(f"trainer-{self.run}", f"has cancelled {task.request.task_id}: {found}")

    # Results

    async def _follow(self) -> None:
        notes = self.notes
        while True:
            limit = self._rng.choice((1, 3, 100))
            after = notes.cursor

            async def page(server: "ServerProcess", after: int = after, limit: int = limit) -> list[WorkRow]:
                if self.run in self._world.schedule.quotas:
                    await server.rollout.update_consumer(self.run, _CONSUMER, after, "session")
                rows = await server.rollout.list_sessions_after(self.run, after, limit)
                if not rows:
                    await server.rollout.wait_for_results(self.run, after, 5.0, "session")
                    rows = await server.rollout.list_sessions_after(self.run, after, limit)
                return rows

            for row in await self._call(page):
                if row.cursor is None or row.cursor <= notes.cursor:
                    self._world.fail(f"{row.task_id}/{row.sample} comes with cursor {row.cursor} after {notes.cursor}.")
                notes.seen.append((row.task_id, row.sample))
                notes.cursor = row.cursor or 0
            await asyncio.sleep(self._rng.uniform(0.05, 1))

    async def _follow_groups(self) -> None:
        notes = self.notes
        while True:
            after = notes.group_cursor

            async def page(server: "ServerProcess", after: int = after) -> list[TaskRow]:
                await server.rollout.wait_for_results(self.run, after, 5.0, "group")
                return await server.rollout.list_groups_after(self.run, after, 2)

            for row in await self._call(page):
                if row.cursor is None or row.cursor <= notes.group_cursor:
                    self._world.fail(f"{row.task_id} comes with cursor {row.cursor} after {notes.group_cursor}.")
                notes.groups.append(row.task_id)
                notes.group_cursor = row.cursor or 0
            await asyncio.sleep(self._rng.uniform(0.1, 2))

    # Quotas and the policy

    async def _change_quotas(self) -> None:
        quotas = self._world.schedule.quotas[self.run]
        while asyncio.get_running_loop().time() < self._world.schedule.ends:
            await asyncio.sleep(self._rng.uniform(0.5, 4))
            running, batch = self._rng.choice((None, 1, 3)), self._rng.choice((None, 1, 3))
            await self._limit(msgspec.structs.replace(quotas, max_running=running, batch=batch))
        await self._limit(quotas)
        self.notes.limited = True

    async def _limit(self, quotas: Quotas) -> None:
        self._world.may_be(self.run, quotas)
        await self._call(lambda server: server.rollout.set_quotas(self.run, quotas))
        self._world.is_now(self.run, quotas)

    async def _steer(self) -> None:
        """Only one trainer does: the engines are all the same ones."""
        notes, world = self.notes, self._world
        if self.run != "default" or not world.schedule.steers or notes.steered:
            return
        while asyncio.get_running_loop().time() < world.schedule.ends:
            await asyncio.sleep(self._rng.uniform(0.2, 2))
            fate = self._rng.random()
            if fate < 0.5:
                await self._set_version(notes.version + 1)
            elif fate < 0.7:
                await self._in_force(lambda steering: steering.add_replica("default", _ANOTHER, None, _SECONDS))
            elif fate < 0.8:
                await self._in_force(lambda steering: steering.remove_replica("default", _ANOTHER, _SECONDS))
            else:
                mode = self._rng.choice(("hold", "freeze"))
                await self._in_force(lambda steering, mode=mode: steering.pause("default", mode, _SECONDS))
                await asyncio.sleep(self._rng.uniform(0, 1))
                await self._in_force(lambda steering: steering.resume("default", _SECONDS))
        await self._in_force(lambda steering: steering.resume("default", _SECONDS))
        notes.steered = True

    async def _set_version(self, version: int) -> None:
        await self._in_force(lambda steering: steering.set_version("default", version, None, _SECONDS))
        self.notes.version = version
        self._world.note("trainer-default", f"has set version {version}")

    async def _in_force(self, work: Callable[[EngineController], Any]) -> None:
        while True:
            try:
                await self._call(lambda server: work(server.rollout.engine_controller))
                return
            except NotAppliedYet:
                await asyncio.sleep(0.5)

"""Production code, broken on purpose: the simulation is worth something only if it notices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import polar.rollout.service
from polar.errors import StoreError
from polar.node.worker import Worker
from polar.rollout.lease_manager import LeaseManager
from polar.rollout.protocol import FinishStatus, HeartbeatResponse, Lease, LeaseId, ServerUnreachable, SessionOutcome
from polar.rollout.queue import Queue, QueueDatabase


class _WithoutFence(Queue):
    """Whoever has something to say of some work is heard."""

    def __init__(self, database: QueueDatabase) -> None:
        super().__init__(database)
        self._sql = replace(self._sql, finish=_less(self._sql.finish, "AND fence = :fence"))


class _EndsTwice(Queue):
    """Told again, an end is one more end."""

    def __init__(self, database: QueueDatabase) -> None:
        super().__init__(database)
        self._sql = replace(self._sql, finish=_less(self._sql.finish, "AND state = :state"))


class _NotAgain(Queue):
    """What a node was given comes once, and was lost if its answer was."""

    async def lease(self, node: str, holding: Any, *arguments: Any) -> Any:
        has = await self._database.query(lambda db: self._load_lease_kills(db, node))
        return await super().lease(node, {*holding, *has}, *arguments)


class _Unguarded(QueueDatabase):
    """A server that was replaced writes on."""

    def __init__(self, store: Any, epoch: int) -> None:
        super().__init__(store, epoch)
        self.sql = replace(self.sql, lock_counter=f"SELECT {epoch} WHERE :name = 'epoch'")


class _NeverInDoubt(QueueDatabase):
    """Whatever the database says of a commit is taken for the truth."""

    @property
    def is_uncertain(self) -> bool:
        return False


class _Endless(Queue):
    """Tries are not counted."""

    async def finish(self, ended: Sequence[SessionOutcome], attempts: int) -> Any:
        return await super().finish(ended, 1 << 30)


class _LosesEnds(Worker):
    """What has ended is told once."""

    async def _finish(self, ended: list[SessionOutcome]) -> list[FinishStatus]:
        try:
            return await self._server.finish(self._context.node_id, ended)
        except (ServerUnreachable, StoreError):
            return ["taken"] * len(ended)


class _Deaf(Worker):
    """It ends nothing that was cancelled."""

    def _apply_orders(self, orders: HeartbeatResponse) -> None:
        orders.cancel.clear()
        super()._apply_orders(orders)


class _Generous(LeaseManager):
    """Quotas are somebody else's business."""

    def _session_budget(self, run: str, busy: int) -> int:
        return 1 << 20


class _Forgetful(LeaseManager):
    """Silent nodes are waited for without end."""

    async def expire_silent_members(self, now: float) -> None:
        return None


class _Drops(LeaseManager):
    """Some of what was given is forgotten at once."""

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        found = await super().lease(node_id, holding, room)
        member = self.members.get(node_id)
        if member is not None and len(found) > 1:
            member.drop_lease(found[0].lease_id)
        return found


def _less(query: str, part: str) -> str:
    assert part in query
    return query.replace(part, "")


QUEUES = {
    "no fence": _WithoutFence,
    "ends twice": _EndsTwice,
    "lost answers stay lost": _NotAgain,
    "endless tries": _Endless,
}
DATABASES = {"no epochs": _Unguarded, "never in doubt": _NeverInDoubt}
LEASINGS = {"no quotas": _Generous, "silence is life": _Forgetful, "forgets a lease": _Drops}
WORKERS = {"tells once": _LosesEnds, "hears no orders": _Deaf}

_ENDLESS = "It does not come to an end: "
MUTANTS = {
    "no fence": r"The result of Work\(.*\) is that of SessionOutcome",
    "ends twice": r"Task\(.*\) has \d+ samples, \d+ of them done",
    "lost answers stay lost": _ENDLESS + "work is not done: .*state='leased'",
    "no epochs": _ENDLESS + "a server that was replaced is still there",
    "never in doubt": _ENDLESS + "(the ledger has|work is not done)",
    "endless tries": "Attempts go from",
    "no quotas": r"\d+ sessions of \w+ run, .* may",
    "silence is life": _ENDLESS + "(the members are|work is not done: .*state='leased'|the trainer steers)",
    "forgets a lease": _ENDLESS + "work is not done: .*state='leased'",
    "tells once": _ENDLESS + r"\S+ has .* in the server's memory",
    "hears no orders": _ENDLESS + "work is not done: .*state='leased'",
}
"""What each of them is found by, among others."""


@contextmanager
def broken(name: str) -> Iterator[type[Worker]]:
    """Meanwhile servers are broken like this; and the worker to use."""
    database: Any = DATABASES.get(name, QueueDatabase)
    queue: Any = QUEUES.get(name, Queue)
    leasing: Any = LEASINGS.get(name, LeaseManager)
    with mock.patch.multiple(polar.rollout.service, QueueDatabase=database, Queue=queue, LeaseManager=leasing):
        yield WORKERS.get(name, Worker)

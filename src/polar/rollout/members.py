"""The nodes that are alive, as far as the server knows, and what each of them has.

A node lives as long as it is heard of. Time is that of the event loop, which nobody can set; after a restart, and after
the server itself stood still, every node gets a full term anew.
"""

import asyncio
from typing import Any

from msgspec import Struct

from polar.rollout.protocol import CancelOrder, Heartbeat, HeartbeatResponse, JoinRequest, LeaseId
from polar.rollout.records import TrackedLease


class NodeMember:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.registration: JoinRequest | None = (
            None  # None: the database says that it has work, and it was not heard of yet
        )
        self.leases: dict[LeaseId, TrackedLease] = {}
        self.cancelled: dict[LeaseId, str] = {}  # why
        self.load: dict[str, Any] = {}
        self.seen_generation = -1  # the generation of the engines that it has heard of
        self.applied_generation = -1
        self.problems: dict[str, list[str]] = {}  # by run
        self.draining = False
        self.ending = False  # somebody told it to end
        self.lost = False
        self.last_seen = asyncio.get_running_loop().time()
        self._lifetime_recorded_at = self.last_seen
        self._wake = asyncio.Event()

    @property
    def name(self) -> str:
        return self.registration.name if self.registration is not None else self.node_id

    @property
    def backends(self) -> frozenset[str]:
        return frozenset(self.registration.backends) if self.registration is not None else frozenset()

    @property
    def slots(self) -> int:
        return self.registration.slots if self.registration is not None else 0

    def mark_alive(self) -> None:
        self.last_seen = asyncio.get_running_loop().time()

    def take_lifetime(self) -> float:
        """The seconds that it is known to have lived since the last time that this was asked."""
        seconds, self._lifetime_recorded_at = self.last_seen - self._lifetime_recorded_at, self.last_seen
        return seconds

    def add_lease(self, tracked: TrackedLease) -> None:
        """A lease of its own, which may be cancelled already."""
        self.leases[tracked.lease_id] = tracked
        if tracked.cancelled is not None:
            self.cancel(tracked.lease_id, tracked.cancelled)

    def cancel(self, held: LeaseId, reason: str) -> None:
        if held in self.leases and held not in self.cancelled:
            self.cancelled[held] = reason
            self._wake.set()

    def drop_lease(self, held: LeaseId) -> None:
        self.cancelled.pop(held, None)
        self.leases.pop(held, None)

    def wake(self) -> None:
        """There is something that it should hear of soon."""
        self._wake.set()

    async def next_orders(self, heartbeat: Heartbeat, generation: int, seconds: float) -> HeartbeatResponse:
        """At once where there is something new; else when the time for the next beat has come."""
        self.load = heartbeat.load
        lost = [held for held in heartbeat.holding if held not in self.leases]
        if not lost and not self._wake.is_set() and heartbeat.seen == generation:
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        return HeartbeatResponse(
            lost=lost,
            cancel=[CancelOrder(held, reason) for held, reason in self.cancelled.items()],
            drain=self.draining,
        )


class NodeView(Struct):
    """What is shown of a node."""

    node_id: str
    name: str
    backends: list[str]
    slots: int
    leases: int
    load: dict[str, Any]
    seen: float  # seconds ago
    draining: bool


def node_view(member: NodeMember) -> NodeView | None:
    """None for one that was not heard of yet."""
    joined = member.registration
    if joined is None:
        return None
    return NodeView(
        node_id=member.node_id,
        name=joined.name,
        backends=joined.backends,
        slots=joined.slots,
        leases=len(member.leases),
        load=member.load,
        seen=asyncio.get_running_loop().time() - member.last_seen,
        draining=member.draining,
    )

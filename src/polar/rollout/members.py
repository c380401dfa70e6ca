"""The nodes that are alive, as far as the server knows, and what each of them has.

A node lives as long as it is heard of. Time is that of the event loop, which nobody can set; after a restart, and after
the server itself stood still, every node gets a full term anew.
"""

import asyncio
from typing import Any

from msgspec import Struct

from polar.rollout.protocol import Beat, Cancel, Held, Joining, Orders
from polar.rollout.records import Tracked


class Member:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.joined: Joining | None = None  # None: the database says that it has work, and it was not heard of yet
        self.leases: dict[Held, Tracked] = {}
        self.cancelled: dict[Held, str] = {}  # why
        self.load: dict[str, Any] = {}
        self.heard = -1  # the generation of the engines that it has heard of
        self.applied = -1
        self.problems: dict[str, list[str]] = {}  # by run
        self.draining = False
        self.ending = False  # somebody told it to end
        self.lost = False
        self.seen = asyncio.get_running_loop().time()
        self._recorded = self.seen
        self._news = asyncio.Event()

    @property
    def name(self) -> str:
        return self.joined.name if self.joined is not None else self.node_id

    @property
    def backends(self) -> frozenset[str]:
        return frozenset(self.joined.backends) if self.joined is not None else frozenset()

    @property
    def slots(self) -> int:
        return self.joined.slots if self.joined is not None else 0

    def hear(self) -> None:
        self.seen = asyncio.get_running_loop().time()

    def take_lifetime(self) -> float:
        """The seconds that it is known to have lived since the last time that this was asked."""
        seconds, self._recorded = self.seen - self._recorded, self.seen
        return seconds

    def has(self, tracked: Tracked) -> None:
        """A lease of its own, which may be cancelled already."""
        self.leases[tracked.held] = tracked
        if tracked.cancelled is not None:
            self.cancel(tracked.held, tracked.cancelled)

    def cancel(self, held: Held, reason: str) -> None:
        if held in self.leases and held not in self.cancelled:
            self.cancelled[held] = reason
            self._news.set()

    def drop(self, held: Held) -> None:
        self.cancelled.pop(held, None)
        self.leases.pop(held, None)

    def tell(self) -> None:
        """There is something that it should hear of soon."""
        self._news.set()

    async def orders(self, beat: Beat, generation: int, seconds: float) -> Orders:
        """At once where there is something new; else when the time for the next beat has come."""
        self.load = beat.load
        lost = [held for held in beat.holding if held not in self.leases]
        if not lost and not self._news.is_set() and beat.seen == generation:
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                pass
        self._news.clear()
        return Orders(
            lost=lost,
            cancel=[Cancel(held, reason) for held, reason in self.cancelled.items()],
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


def view(member: Member) -> NodeView | None:
    """None for one that was not heard of yet."""
    joined = member.joined
    if joined is None:
        return None
    return NodeView(
        node_id=member.node_id,
        name=joined.name,
        backends=joined.backends,
        slots=joined.slots,
        leases=len(member.leases),
        load=member.load,
        seen=asyncio.get_running_loop().time() - member.seen,
        draining=member.draining,
    )

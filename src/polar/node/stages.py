"""Stages: each admits a fixed number of sessions at a time; the others wait, by priority.

    INIT ──► READY ──► RUN ──► POSTRUN

A session leaves INIT only when READY has room, so READY is a bounded buffer of prepared sessions that fills a free run
slot at once.
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Literal

StageName = Literal["init", "ready", "run", "postrun"]


class Stage:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.active = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._queue_changed = asyncio.Event()  # a session has left the queue
        self._order = count()

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for _, _, turn in self._waiting)

    async def enter(self, priority: int = 0) -> None:
        """Waits for a slot. Higher priorities go first; equal ones in order of arrival."""
        if self.active < self.size:  # then the queue is empty
            self.active += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the slot was granted at the same moment
            raise
        finally:
            self._queue_changed.set()

    async def wait_until_queue_below(self, length: int) -> None:
        """Waits until fewer than `length` sessions queue."""
        while self.waiting >= length:
            self._queue_changed.clear()
            await self._queue_changed.wait()

    def leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)  # the slot is handed over
                return
        self.active -= 1

    @asynccontextmanager
    async def slot(self, priority: int = 0) -> AsyncIterator[None]:
        await self.enter(priority)
        try:
            yield
        finally:
            self.leave()


class StageTiming:
    """How long a session spent in each stage, and waiting between them."""

    def __init__(self) -> None:
        self.began_at = time.time()
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def record(self, stage: str) -> None:
        """Adds the time since the last call to `stage`."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

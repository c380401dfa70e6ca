"""How long ended tasks are kept.

Hours are those that servers have run here, one after the other: a clock that is set wrong makes nothing older. Every
now and then it is noted how far the results had come; what had ended by a note that is old enough is forgotten.
"""

import asyncio
import logging

import msgspec
from msgspec import Struct

from polar.errors import StoreError
from polar.rollout.queue import Queue

log = logging.getLogger(__name__)

_NOTES = 100  # in the time that results are kept
_AT_ONCE = 50  # tasks that are forgotten in one transaction
_FACT = "retention"


class Note(Struct, array_like=True):
    served: float  # seconds, of all servers so far
    cursor: int  # of the last result then


class Retention:
    def __init__(self, queue: Queue, hours: float) -> None:
        self._queue = queue
        self._seconds = hours * 3600
        self._notes: list[Note] = []

    async def keep(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        known = await self._queue.fact(_FACT)
        self._notes = [Note(0.0, 0)] if known is None else msgspec.json.decode(known, type=list[Note])
        began = loop.time() - self._notes[-1].served
        while True:
            await asyncio.sleep(self._seconds / _NOTES)
            try:
                await self._look(loop.time() - began)
            except StoreError as error:
                log.error("What has ended long ago could not be forgotten: %s", error)

    async def _look(self, served: float) -> None:
        self._notes.append(Note(served, await self._queue.cursor()))
        old = [note for note in self._notes if note.served <= served - self._seconds]
        if old:
            while await self._queue.forget(old[-1].cursor, _AT_ONCE):
                pass  # a few at a time: others write, too
            self._notes = [note for note in self._notes if note.served >= old[-1].served]
        await self._queue.keep_fact(_FACT, msgspec.json.encode(self._notes).decode())

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

_MARKS_PER_PERIOD = 100  # in the time that results are kept
_MAX_TASKS_PER_TRANSACTION = 50  # tasks that are forgotten in one transaction
_FACT_NAME = "retention"


class RetentionMark(Struct, array_like=True):
    served_seconds: float  # seconds, of all servers so far
    cursor: int  # of the last result then


class Retention:
    def __init__(self, queue: Queue, hours: float) -> None:
        self._queue = queue
        self._seconds = hours * 3600
        self._marks: list[RetentionMark] = []

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        known = await self._queue.fact(_FACT_NAME)
        self._marks = [RetentionMark(0.0, 0)] if known is None else msgspec.json.decode(known, type=list[RetentionMark])
        began = loop.time() - self._marks[-1].served_seconds
        while True:
            await asyncio.sleep(self._seconds / _MARKS_PER_PERIOD)
            try:
                await self._delete_expired(loop.time() - began)
            except StoreError as error:
                log.error("What has ended long ago could not be forgotten: %s", error)

    async def _delete_expired(self, served: float) -> None:
        self._marks.append(RetentionMark(served, await self._queue.last_cursor()))
        old = [note for note in self._marks if note.served_seconds <= served - self._seconds]
        if old:
            while await self._queue.delete_ended_tasks(old[-1].cursor, _MAX_TASKS_PER_TRANSACTION):
                pass  # a few at a time: others write, too
            self._marks = [note for note in self._marks if note.served_seconds >= old[-1].served_seconds]
        await self._queue.save_fact(_FACT_NAME, msgspec.json.encode(self._marks).decode())

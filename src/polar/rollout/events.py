"""What happens in the service, told to whoever listens.

Telling waits for nobody. Who listens too slowly is let go with a last word (`lagged`), and so is told who comes back
after more than is remembered: results have a feed of their own, which loses nothing.

    task.submitted  task.redirected  task.ended  session.leased  session.ended  session.retried
    node.joined  node.lost  node.left  policy.changed  engines.changed  callback.failed
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Struct

LAGGED = "lagged"
_REMEMBERED = 10_000
_WAITING = 1_000
"""Events that may wait for one listener."""


class Event(Struct, frozen=True):
    id: str
    kind: str
    run: str | None  # None: it concerns all of them
    data: bytes  # JSON
    fields: dict[str, Any]


class Events:
    """Ids begin with a word that is new with every start, so that one from before it is known for what it is."""

    def __init__(self, remembered: int = _REMEMBERED, waiting: int = _WAITING) -> None:
        self._start = secrets.token_hex(4)
        self._count = 0
        self._latest: deque[Event] = deque(maxlen=remembered)
        self._listeners: set[Listener] = set()
        self._waiting = waiting
        self.closed = False

    def publish(self, kind: str, *, run: str | None = None, **fields: Any) -> None:
        """From the event loop's thread."""
        self._count += 1
        told = {"run": run, **fields} if run is not None else fields
        event = Event(f"{self._start}-{self._count}", kind, run, msgspec.json.encode(told), told)
        self._latest.append(event)
        for listener in list(self._listeners):
            listener.hear(event)

    def subscribe(self, run: str | None = None, after: str | None = None) -> "Listener":
        """What happens from now on, or from behind the event with the id `after`; of one run, or of all."""
        listener = Listener(self, run, self._waiting)
        if after is not None:
            missed = self._since(after)
            if missed is None:
                listener.hear(self._lagged("more has happened than is remembered"))
            for event in missed or ():
                listener.hear(event, force=True)
        if self.closed:
            listener.end()
        else:
            self._listeners.add(listener)
        return listener

    def close(self) -> None:
        """Lets every listener go."""
        self.closed = True
        for listener in list(self._listeners):
            listener.end()

    def lag(self, why: str) -> None:
        """Something may have happened that was not told: every listener hears so, and is let go."""
        for listener in list(self._listeners):
            listener.hear(self._lagged(why), force=True)
            listener.end()

    def forget(self, listener: "Listener") -> None:
        self._listeners.discard(listener)

    def _since(self, after: str) -> list[Event] | None:
        """None where some of what came after it is gone."""
        start, _, number = after.rpartition("-")
        if start != self._start or not (number.isascii() and number.isdigit()) or len(number) > 18:
            return None
        oldest = self._count - len(self._latest)
        if not oldest <= int(number) <= self._count:
            return None
        return list(self._latest)[int(number) - oldest :]

    def _lagged(self, why: str) -> Event:
        told = {"detail": f"{why}: read GET /rollout/results for what ended meanwhile"}
        return Event(f"{self._start}-{self._count}", LAGGED, None, msgspec.json.encode(told), told)


class Listener:
    """Events as they come: iterate over it, or wait for the `next` one. None, and the iteration's end, is the end."""

    def __init__(self, events: Events, run: str | None, waiting: int) -> None:
        self._events = events
        self._run = run
        self._waiting = waiting
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()

    def hear(self, event: Event, *, force: bool = False) -> None:
        if self._run is not None and event.run is not None and event.run != self._run:
            return
        if self._queue.qsize() >= self._waiting and not force:
            self._queue.put_nowait(self._events._lagged("you listened too slowly"))
            self.end()
        else:
            self._queue.put_nowait(event)

    def end(self) -> None:
        self._events.forget(self)
        self._queue.put_nowait(None)

    async def next(self) -> Event | None:
        event = await self._queue.get()
        if event is None:
            self._queue.put_nowait(None)  # for whoever asks again
        return event

    def close(self) -> None:
        self._events.forget(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while (event := await self.next()) is not None:
                yield event
        finally:
            self.close()

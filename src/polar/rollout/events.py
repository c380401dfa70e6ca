"""Events of the service, published to listeners.

Publishing never waits. A listener that is too slow gets a last event (`lagged`) and is dropped; one that resumes after
an event that is forgotten gets `lagged`, too. Results have a feed of their own, which loses nothing.

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
_MAX_REMEMBERED_EVENTS = 10_000
_MAX_PENDING_EVENTS = 1_000
"""Undelivered events of one listener."""


class ServiceEvent(Struct, frozen=True):
    id: str
    kind: str
    run: str | None  # None: it concerns all runs
    data: bytes  # JSON
    fields: dict[str, Any]


class EventBus:
    """Event ids begin with a random word of this start, so that ids from before a restart are recognized."""

    def __init__(self, max_remembered: int = _MAX_REMEMBERED_EVENTS, max_pending: int = _MAX_PENDING_EVENTS) -> None:
        self._start = secrets.token_hex(4)
        self._count = 0
        self._remembered: deque[ServiceEvent] = deque(maxlen=max_remembered)
        self._listeners: set[EventListener] = set()
        self._max_pending = max_pending
        self.closed = False

    def publish(self, kind: str, *, run: str | None = None, **fields: Any) -> None:
        """To be called in the event loop's thread."""
        self._count += 1
        payload = {"run": run, **fields} if run is not None else fields
        event = ServiceEvent(f"{self._start}-{self._count}", kind, run, msgspec.json.encode(payload), payload)
        self._remembered.append(event)
        for listener in list(self._listeners):
            listener.deliver(event)

    def subscribe(self, run: str | None = None, after: str | None = None) -> "EventListener":
        """Listens to events from now on, or to those behind the event id `after`; of one run, or of all."""
        listener = EventListener(self, run, self._max_pending)
        if after is not None:
            missed = self._list_events_after(after)
            if missed is None:
                listener.deliver(self._make_lagged_event("events were forgotten since"))
            for event in missed or ():
                listener.deliver(event, force=True)
        if self.closed:
            listener.end()
        else:
            self._listeners.add(listener)
        return listener

    def close(self) -> None:
        """Ends every listener."""
        self.closed = True
        for listener in list(self._listeners):
            listener.end()

    def mark_lagged(self, why: str) -> None:
        """Ends every listener with a `lagged` event: events may have been missed."""
        for listener in list(self._listeners):
            listener.deliver(self._make_lagged_event(why), force=True)
            listener.end()

    def remove_listener(self, listener: "EventListener") -> None:
        self._listeners.discard(listener)

    def _list_events_after(self, after: str) -> list[ServiceEvent] | None:
        """None where some of these events are forgotten."""
        start, _, number = after.rpartition("-")
        if start != self._start or not (number.isascii() and number.isdigit()) or len(number) > 18:
            return None
        oldest = self._count - len(self._remembered)
        if not oldest <= int(number) <= self._count:
            return None
        return list(self._remembered)[int(number) - oldest :]

    def _make_lagged_event(self, why: str) -> ServiceEvent:
        payload = {"detail": f"{why}: read GET /rollout/results for what ended meanwhile"}
        return ServiceEvent(f"{self._start}-{self._count}", LAGGED, None, msgspec.json.encode(payload), payload)


class EventListener:
    """Events as they come: iterate over it, or call `wait_for_event`, which returns None at the end."""

    def __init__(self, events: EventBus, run: str | None, max_pending: int) -> None:
        self._events = events
        self._run = run
        self._max_pending = max_pending
        self._queue: asyncio.Queue[ServiceEvent | None] = asyncio.Queue()

    def deliver(self, event: ServiceEvent, *, force: bool = False) -> None:
        if self._run is not None and event.run is not None and event.run != self._run:
            return
        if self._queue.qsize() >= self._max_pending and not force:
            self._queue.put_nowait(self._events._make_lagged_event("you listened too slowly"))
            self.end()
        else:
            self._queue.put_nowait(event)

    def end(self) -> None:
        self._events.remove_listener(self)
        self._queue.put_nowait(None)

    async def wait_for_event(self) -> ServiceEvent | None:
        event = await self._queue.get()
        if event is None:
            self._queue.put_nowait(None)  # for the next call
        return event

    def close(self) -> None:
        self._events.remove_listener(self)

    async def __aiter__(self) -> AsyncIterator[ServiceEvent]:
        try:
            while (event := await self.wait_for_event()) is not None:
                yield event
        finally:
            self.close()

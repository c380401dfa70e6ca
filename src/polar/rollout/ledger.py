"""What is queued, running and done, counted as it changes; and who waits for some of it.

All of it can be counted anew from the database, and is from time to time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polar.rollout.events import Events
from polar.rollout.models import Unit
from polar.rollout.records import Change, Counts, Lane, TaskRow, Totals
from polar.store.base import Evidence, is_suspicious


class Watcher(Protocol):
    """Who counts what happens (telemetry.ServiceMetrics)."""

    def leased(self, count: int) -> None: ...

    def expired(self, count: int) -> None: ...

    def retried(self, reason: str) -> None: ...

    def ended(
        self, run: str, reward: float | None, reason: str | None, seconds: Mapping[str, float], lag: int | None
    ) -> None: ...

    def count_evidence(self, run: str, evidence: Sequence[Evidence]) -> None: ...


class Nobody:
    """A watcher that does not look."""

    def leased(self, count: int) -> None: ...

    def expired(self, count: int) -> None: ...

    def retried(self, reason: str) -> None: ...

    def ended(
        self, run: str, reward: float | None, reason: str | None, seconds: Mapping[str, float], lag: int | None
    ) -> None: ...

    def count_evidence(self, run: str, evidence: Sequence[Evidence]) -> None: ...


class Ledger:
    def __init__(self, events: Events) -> None:
        self._events = events
        self.watcher: Watcher = Nobody()
        self.lanes: dict[Lane, Counts] = {}
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self.untaken: defaultdict[str, int] = defaultdict(int)  # graded sessions that no consumer has taken, by run
        self._newest: defaultdict[tuple[str, Unit], int] = defaultdict(int)  # cursors
        self._readers: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)  # by run
        self.closed = False  # nobody is to wait any more
        self._hungry: dict[asyncio.Future[None], frozenset[str]] = {}  # nodes that wait, and the lanes they can serve

    def counts(self, lane: Lane) -> Counts:
        return self.lanes.setdefault(lane, Counts())

    def of_run(self, run: str) -> Counts:
        found = [counts for lane, counts in self.lanes.items() if lane.run == run]
        return Counts(
            sum(one.queued for one in found), sum(one.leased for one in found), sum(one.waiting for one in found)
        )

    def submitted(self, lane: Lane, task_id: str, samples: int) -> None:
        self.counts(lane).queued += samples
        self.totals[lane.run].tasks += 1
        self._events.publish("task.submitted", run=lane.run, task_id=task_id, samples=samples)

    def forget_ended_task(self, task: TaskRow) -> None:
        """An ended task is run again: what it came to is not counted any more."""
        totals = self.totals[task.run]
        totals.tasks -= 1
        totals.ended -= task.ended
        totals.usable -= task.usable

    def announce_redirect(self, run: str, task_id: str) -> None:
        self._events.publish("task.redirected", run=run, task_id=task_id)

    def leased(self, lane: Lane, task_id: str, sample: int, node_id: str) -> None:
        counts = self.counts(lane)
        counts.queued -= 1
        counts.leased += 1
        self.watcher.leased(1)
        self._events.publish("session.leased", run=lane.run, task_id=task_id, sample=sample, node_id=node_id)

    def changed(self, change: Change) -> None:
        run, ended, counts = change.lane.run, change.ended, self.counts(change.lane)
        setattr(counts, change.was, getattr(counts, change.was) - 1)
        told: dict[str, Any] = {"run": run, "task_id": change.task_id, "sample": change.sample, "reason": ended.reason}
        if change.became == "done":
            usable = ended.reason is None
            self.totals[run].ended += 1
            self.totals[run].usable += usable
            self.untaken[run] += usable
            told |= {"session_id": ended.session_id, "reward": ended.reward, "cursor": change.cursor}
            told |= {"suspicious": is_suspicious(ended.evidence), "evidence": sum(one.count for one in ended.evidence)}
            self._events.publish("session.ended", **told)
            self._came(run, "session", change.cursor)
            self.watcher.ended(run, ended.reward, ended.reason, ended.seconds, ended.lag)
            self.watcher.count_evidence(run, ended.evidence)
        else:
            if change.became == "waiting":
                self.watcher.retried(ended.reason or "")
            setattr(counts, change.became, getattr(counts, change.became) + 1)
            self._events.publish("session.retried", **told)
        if change.task is not None:
            task = change.task
            told = {"task_id": task.task_id, "status": task.state, "callback": task.callback}
            self._events.publish("task.ended", run=run, **told)
            self._came(run, "group", change.task.cursor)
        for other in change.others:
            self.changed(other)

    # Those who wait for results

    def _came(self, run: str, unit: Unit, cursor: int | None) -> None:
        self._newest[run, unit] = max(self._newest[run, unit], cursor or 0)
        for reader in self._readers[run]:
            if not reader.done():
                reader.set_result(None)

    def wake(self) -> None:
        """Everybody: there may be something that nobody was told of."""
        for readers in self._readers.values():
            for reader in readers:
                if not reader.done():
                    reader.set_result(None)

    async def wait(self, run: str, after: int, seconds: float, unit: Unit) -> None:
        """Until there may be something beyond `after`."""
        if self.closed:
            return
        if self._newest[run, unit] > after:
            await asyncio.sleep(0.02)  # whoever looks and finds nothing all the same is not to look without end
            return
        waiting = asyncio.get_running_loop().create_future()
        self._readers[run].add(waiting)
        try:
            await _within(seconds, waiting)
        finally:
            self._readers[run].discard(waiting)

    def close(self) -> None:
        self.closed = True
        for waiting in [*self._hungry, *(reader for readers in self._readers.values() for reader in readers)]:
            if not waiting.done():
                waiting.set_result(None)

    # Those who wait for work

    async def hunger(self, lanes: frozenset[str], seconds: float) -> None:
        """Until there may be work in one of these lanes, or so many seconds."""
        waiting = asyncio.get_running_loop().create_future()
        self._hungry[waiting] = lanes
        try:
            await _within(seconds, waiting)
        finally:
            self._hungry.pop(waiting, None)

    def feed(self) -> None:
        """Wakes as many nodes as there is work for, those first who have waited longest. Whoever then gets all that it
        has room for says so, and the next are woken."""
        queued: defaultdict[str, int] = defaultdict(int)
        for lane, counts in self.lanes.items():
            queued[lane.name] += counts.queued
        for waiting, lanes in list(self._hungry.items()):
            name = next((name for name in lanes if queued[name] > 0), None)
            if name is not None and not waiting.done():
                queued[name] -= 1
                waiting.set_result(None)


async def _within(seconds: float, waiting: "asyncio.Future[None]") -> None:
    await asyncio.wait([waiting], timeout=max(0.0, seconds))
    waiting.cancel()

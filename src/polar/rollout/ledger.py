"""The ledger: counts of queued, running and ended work, and those who wait for work or results.

All counts can be recomputed from the database, and are from time to time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polar.records.result import ResultUnit
from polar.records.session import Evidence, is_suspicious
from polar.rollout.events import EventBus
from polar.rollout.queue.records import Counts, Lane, TaskRow, Totals, WorkChange


class QueueMetrics(Protocol):
    """Metrics of the queue (telemetry.ServiceMetrics)."""

    def count_leased(self, count: int) -> None: ...

    def count_expired(self, count: int) -> None: ...

    def count_retried(self, reason: str) -> None: ...

    def count_ended(
        self, run: str, reward: float | None, reason: str | None, seconds: Mapping[str, float], lag: int | None
    ) -> None: ...

    def count_evidence(self, run: str, evidence: Sequence[Evidence]) -> None: ...


class NoMetrics:
    """Metrics that count nothing."""

    def count_leased(self, count: int) -> None: ...

    def count_expired(self, count: int) -> None: ...

    def count_retried(self, reason: str) -> None: ...

    def count_ended(
        self, run: str, reward: float | None, reason: str | None, seconds: Mapping[str, float], lag: int | None
    ) -> None: ...

    def count_evidence(self, run: str, evidence: Sequence[Evidence]) -> None: ...


class Ledger:
    def __init__(self, events: EventBus) -> None:
        self._events = events
        self.metrics: QueueMetrics = NoMetrics()
        self.lanes: dict[Lane, Counts] = {}
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self.untaken: defaultdict[str, int] = defaultdict(int)  # graded sessions that no consumer has taken, by run
        self._last_cursor: defaultdict[tuple[str, ResultUnit], int] = defaultdict(int)
        self._readers: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)  # by run
        self.closed = False  # waits return at once
        self._idle_nodes: dict[
            asyncio.Future[None], frozenset[str]
        ] = {}  # waiting nodes, and the lanes that each can serve

    def get_counts(self, lane: Lane) -> Counts:
        return self.lanes.setdefault(lane, Counts())

    def sum_counts(self, run: str) -> Counts:
        lanes = [counts for lane, counts in self.lanes.items() if lane.run == run]
        return Counts(
            sum(counts.queued for counts in lanes),
            sum(counts.leased for counts in lanes),
            sum(counts.waiting for counts in lanes),
        )

    def record_submitted(self, lane: Lane, task_id: str, samples: int) -> None:
        self.get_counts(lane).queued += samples
        self.totals[lane.run].tasks += 1
        self._events.publish("task.submitted", run=lane.run, task_id=task_id, samples=samples)

    def forget_ended_task(self, task: TaskRow) -> None:
        """Takes an ended task out of the totals, because it is run again."""
        totals = self.totals[task.run]
        totals.tasks -= 1
        totals.ended -= task.ended
        totals.usable -= task.usable

    def announce_redirect(self, run: str, task_id: str) -> None:
        self._events.publish("task.redirected", run=run, task_id=task_id)

    def record_leased(self, lane: Lane, task_id: str, sample: int, node_id: str) -> None:
        counts = self.get_counts(lane)
        counts.queued -= 1
        counts.leased += 1
        self.metrics.count_leased(1)
        self._events.publish("session.leased", run=lane.run, task_id=task_id, sample=sample, node_id=node_id)

    def record_change(self, change: WorkChange) -> None:
        run, outcome, counts = change.lane.run, change.outcome, self.get_counts(change.lane)
        setattr(counts, change.old_state, getattr(counts, change.old_state) - 1)
        fields: dict[str, Any] = {
            "run": run,
            "task_id": change.task_id,
            "sample": change.sample,
            "reason": outcome.reason,
        }
        if change.new_state == "done":
            usable = outcome.reason is None
            self.totals[run].ended += 1
            self.totals[run].usable += usable
            self.untaken[run] += usable
            fields |= {"session_id": outcome.session_id, "reward": outcome.reward, "cursor": change.cursor}
            fields |= {
                "suspicious": is_suspicious(outcome.evidence),
                "evidence": sum(item.count for item in outcome.evidence),
            }
            self._events.publish("session.ended", **fields)
            self._wake_readers(run, "session", change.cursor)
            self.metrics.count_ended(run, outcome.reward, outcome.reason, outcome.seconds, outcome.lag)
            self.metrics.count_evidence(run, outcome.evidence)
        else:
            if change.new_state == "waiting":
                self.metrics.count_retried(outcome.reason or "")
            setattr(counts, change.new_state, getattr(counts, change.new_state) + 1)
            self._events.publish("session.retried", **fields)
        if change.ended_task is not None:
            task = change.ended_task
            fields = {"task_id": task.task_id, "status": task.state, "callback": task.has_callback}
            self._events.publish("task.ended", run=run, **fields)
            self._wake_readers(run, "group", change.ended_task.cursor)
        for other in change.cancelled_work:
            self.record_change(other)

    # Readers that wait for results

    def _wake_readers(self, run: str, unit: ResultUnit, cursor: int | None) -> None:
        self._last_cursor[run, unit] = max(self._last_cursor[run, unit], cursor or 0)
        for reader in self._readers[run]:
            if not reader.done():
                reader.set_result(None)

    def wake_all_readers(self) -> None:
        """Wakes every reader: results may have been missed."""
        for readers in self._readers.values():
            for reader in readers:
                if not reader.done():
                    reader.set_result(None)

    async def wait_for_results(self, run: str, after: int, seconds: float, unit: ResultUnit) -> None:
        """Waits until there may be results beyond `after`, or `seconds` have passed."""
        if self.closed:
            return
        if self._last_cursor[run, unit] > after:
            await asyncio.sleep(0.02)  # keeps a reader that finds nothing from polling in a busy loop
            return
        waiter = asyncio.get_running_loop().create_future()
        self._readers[run].add(waiter)
        try:
            await _wait_at_most(seconds, waiter)
        finally:
            self._readers[run].discard(waiter)

    def close(self) -> None:
        self.closed = True
        for waiter in [*self._idle_nodes, *(reader for readers in self._readers.values() for reader in readers)]:
            if not waiter.done():
                waiter.set_result(None)

    # Nodes that wait for work

    async def wait_for_work(self, lanes: frozenset[str], seconds: float) -> None:
        """Waits until there may be work in one of these lanes, or `seconds` have passed."""
        waiter = asyncio.get_running_loop().create_future()
        self._idle_nodes[waiter] = lanes
        try:
            await _wait_at_most(seconds, waiter)
        finally:
            self._idle_nodes.pop(waiter, None)

    def notify_work(self) -> None:
        """Wakes as many nodes as there is work for, the longest waiting first. A node whose room is filled calls this
        again, so that the next ones are woken."""
        queued: defaultdict[str, int] = defaultdict(int)
        for lane, counts in self.lanes.items():
            queued[lane.name] += counts.queued
        for waiter, lanes in list(self._idle_nodes.items()):
            name = next((name for name in lanes if queued[name] > 0), None)
            if name is not None and not waiter.done():
                queued[name] -= 1
                waiter.set_result(None)


async def _wait_at_most(seconds: float, waiter: "asyncio.Future[None]") -> None:
    await asyncio.wait([waiter], timeout=max(0.0, seconds))
    waiter.cancel()

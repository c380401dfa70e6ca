"""Group commit: one thread writes, and one transaction has all the work that was waiting when it began.

A caller submits work and awaits it; the work runs in the writer's thread. While one transaction is being committed, the
work of the next one gathers: the higher the load, the cheaper each write, and a lone write never waits.

Invariant: `submit` returns only after the commit, and submitted work is done even if its caller was cancelled.

When the database can't write, `failure` says why. The writer then probes it from time to time, so that `failure` is
cleared soon after the cause is gone, even if nobody writes.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

from polar.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_LIMIT = 256
TRIES = 5
PROBE_SECONDS = 1.0
"""How often a database that can't write is probed."""


class TransactionBackend(Protocol):
    """The transactions of a database. All methods are called in the writer's thread."""

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def roll_back(self, error: Exception) -> bool:
        """Rolls back after `error`. Returns True if the work is not at fault (the connection was lost, say) and must be
        done again. If it was committed after all, doing it again must change nothing."""
        ...

    def on_settled(self) -> None:
        """Called when all work that was begun is committed or has failed for good."""
        ...

    def to_store_error(self, error: Exception) -> StoreError: ...

    def is_write_failure(self, error: Exception) -> bool:
        """Whether the error says that the database can't write at all now."""
        ...

    def probe(self) -> None:
        """Writes as much as usual work does, inside a transaction. Raises if that fails."""
        ...

    def close(self) -> None: ...


class _Job:
    __slots__ = ("error", "future", "is_settled", "loop", "result", "work")

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]") -> None:
        self.work = work
        self.loop = loop
        self.future = future
        self.is_settled = False
        self.result: Any = None
        self.error: StoreError | None = None

    def settle(self, result: Any, error: StoreError | None) -> None:
        self.result, self.error, self.is_settled = result, error, True

    def resolve_future(self) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class GroupCommit:
    def __init__(self, transactions: TransactionBackend, name: str) -> None:
        self._transactions = transactions
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = Lock()  # nothing enters the queue after the None that ends it
        self._closed = False
        self._next_probe = 0.0
        self.commits = 0
        self.failure: StoreError | None = None
        """Why the database can't write, or None. May be read in any thread."""
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def submit(self, work: Callable[[], T]) -> T:
        """Runs `work` inside a transaction; returns its result once that is committed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise make_store_closed_error()
            self._queue.put(_Job(work, loop, future))
        return await future

    async def close(self) -> None:
        """Returns when all submitted work is done and the database is closed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take_batch()
            if batch:
                self._run_batch(batch)
                _resolve_futures(batch)
            if self.failure is not None and not self._closed and monotonic() >= self._next_probe:
                self._probe()
        self._transactions.close()

    def _take_batch(self) -> tuple[list[_Job], bool]:
        """Returns the work that is waiting, and whether the queue is still open."""
        batch: list[_Job] = []
        try:
            job = self._queue.get(timeout=None if self.failure is None else PROBE_SECONDS)
        except Empty:
            return batch, True
        while job is not None:
            batch.append(job)
            if len(batch) == BATCH_LIMIT:
                return batch, True
            try:
                job = self._queue.get_nowait()
            except Empty:
                return batch, True
        return batch, False

    def _run_batch(self, batch: Sequence[_Job]) -> None:
        try:
            if not self._run_transaction(batch):
                for job in batch:
                    self._run_transaction([job])
            self._transactions.on_settled()
        except Exception as error:  # noqa: BLE001 - no work's own fault, so it goes to all that is left; the thread goes on
            for job in batch:
                if not job.is_settled:
                    self._fail(job, error)

    def _run_transaction(self, batch: Sequence[_Job]) -> bool:
        """Runs a batch in one transaction. Returns False if one of several jobs failed: then nothing is written or
        settled, and the caller runs each job alone, so that only the one at fault fails."""
        tries = 1
        while True:
            self._transactions.begin()
            try:
                results = [job.work() for job in batch]
                self._transactions.commit()
                break
            except Exception as error:  # noqa: BLE001 - it goes to the caller whose work it was
                if self._transactions.roll_back(error) and tries < TRIES:
                    tries += 1
                    continue
                if len(batch) > 1:
                    return False
                self._fail(batch[0], error)
                return True
        self.commits += 1
        for job, result in zip(batch, results, strict=True):
            job.settle(result, None)
        return True

    def _fail(self, job: _Job, error: Exception) -> None:
        reason = self._transactions.to_store_error(error)
        if reason is not error:
            reason.__cause__ = error
        if self._transactions.is_write_failure(error):
            self._set_failure(reason)
        job.settle(None, reason)

    def _set_failure(self, failure: StoreError) -> None:
        if self.failure is None:
            log.error("The store can't write: %s", failure)
        self.failure = failure

    def _probe(self) -> None:
        """Tests whether the database can write again. A success of ordinary work would prove less: a small write may
        fit on a full disk."""
        try:
            self._transactions.begin()
            try:
                self._transactions.probe()
                self._transactions.commit()
            except Exception as error:
                self._transactions.roll_back(error)
                raise
            self._transactions.on_settled()
        except Exception as error:  # noqa: BLE001 - whatever it is, the database could not write
            self._set_failure(self._transactions.to_store_error(error))
        else:
            self.failure = None
            log.warning("The store can write again.")
        self._next_probe = monotonic() + PROBE_SECONDS


def _resolve_futures(batch: Sequence[_Job]) -> None:
    """Wakes the callers, with one call per event loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
    for job in batch:
        by_loop[job.loop].append(job)
    for loop, jobs in by_loop.items():
        with suppress(RuntimeError):  # that loop is closed, and its callers with it
            loop.call_soon_threadsafe(_resolve_in_loop, jobs)


def _resolve_in_loop(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.resolve_future()


def make_store_closed_error() -> StoreError:
    return StoreError("The store is closed; open it again before using it.")

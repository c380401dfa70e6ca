"""The store over any SQL database: the common part of `sqlite` and `postgres`.

One thread writes on a connection of its own, with group commit; others read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from polar.errors import StoreError
from polar.records.exchange import Exchange, ExchangeStatus, StartedCall, TokenIds
from polar.records.session import Session, SessionRecord, Verdict
from polar.store import session_copy
from polar.store.base_link import make_damaged_store_error
from polar.store.group_commit import GroupCommit, TransactionBackend, make_store_closed_error
from polar.store.reader import Reader
from polar.store.recorder import Recorder
from polar.store.sql import Connection, ParameterStyle, WritingConnection
from polar.types import UsageTotals

log = logging.getLogger(__name__)

T = TypeVar("T")

LINEAGE_MEMORY_BYTES = 64 * 1024 * 1024
"""Memory for the lineages of sessions, by which the writer stores the next exchange by difference."""


class WriterBackend(TransactionBackend, Protocol):
    """What the writing thread needs of a database."""

    @property
    def connection(self) -> WritingConnection: ...

    @property
    def recorder(self) -> Recorder: ...


class ReaderBackend(Protocol):
    """What the reading threads need of a database."""

    @property
    def connection(self) -> Connection:
        """The connection of the reading thread that uses it."""
        ...

    @property
    def reader(self) -> Reader: ...

    @property
    def thread_count(self) -> int: ...

    @property
    def driver_error(self) -> type[Exception]:
        """The base class of the driver's exceptions."""
        ...

    def to_store_error(self, error: Exception) -> StoreError: ...

    def close(self) -> None: ...


class RelationalStore:
    """Implements `Store`. A session's exchanges must be written through one open store at a time; others may read."""

    def __init__(self, writer: WriterBackend, readers: ReaderBackend, location: str, style: ParameterStyle) -> None:
        self._location = location
        self._parameter_style: ParameterStyle = style
        self._connection = writer.connection
        self._recorder = writer.recorder
        self._group_commit = GroupCommit(writer, f"polar-store-writer {location}")
        self._readers = readers
        self._reader = readers.reader
        self._reader_threads = ThreadPoolExecutor(readers.thread_count, f"polar-store-reader {location}")
        self._closed = False

    @property
    def parameter_style(self) -> ParameterStyle:
        """How parameters are written in the SQL of `transact` and `query`."""
        return self._parameter_style

    @property
    def commits(self) -> int:
        """Transactions committed so far; usually fewer than records written."""
        return self._group_commit.commits

    @property
    def write_failure(self) -> str | None:
        failure = self._group_commit.failure
        return None if failure is None else str(failure)

    @property
    def lineage_bytes(self) -> int:
        """Memory held for storing by difference, about."""
        return self._recorder.lineages.size

    @property
    def memory_bytes(self) -> int:
        """Memory held for storing by difference, about: lineages, and recent items and fields with their digests."""
        return self._recorder.memory_bytes

    async def transact(self, work: Callable[[WritingConnection], T]) -> T:
        """Runs `work` in the writing thread, inside a transaction that it may share with other work; returns its result
        once that is durable.

        The work may run several times: when other work in the transaction fails, or when the connection is lost. In
        the latter case the previous run may have been committed all the same. So `work` must be idempotent in the
        database, and must change nothing else.

        A failed statement may raise only later, anywhere in `work`, which must not catch that. To fail on purpose,
        `work` raises a StoreError: that undoes this work alone, and reaches the caller unchanged."""
        return await self._group_commit.submit(lambda: work(self._connection))

    async def query(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in a reading thread, without a transaction: each statement sees what is committed when it
        begins."""
        return await self._read(lambda: work(self._readers.connection))

    async def ensure_store_id(self) -> str:
        """Returns the store's id, by which two processes see whether they share a store."""
        return await self._group_commit.submit(self._recorder.ensure_store_id)

    async def create_session(self, session: Session) -> None:
        await self._group_commit.submit(lambda: self._recorder.create_session(session))

    async def end_session(self, session_id: str, *, ended_at: float, verdict: Verdict) -> Session | None:
        return await self._group_commit.submit(lambda: self._recorder.end_session(session_id, ended_at, verdict))

    async def revoke_session_reward(self, session_id: str, reason: str) -> None:
        await self._group_commit.submit(lambda: self._recorder.revoke_session_reward(session_id, reason))

    async def append(self, exchange: Exchange) -> None:
        exchange.parent = await self._group_commit.submit(lambda: self._recorder.append(exchange))

    async def record_interrupted(self, calls: Sequence[StartedCall]) -> list[str]:
        return await self._group_commit.submit(lambda: self._recorder.record_interrupted(calls))

    async def amend(self, exchange_id: str, *, status: ExchangeStatus, delivered: int) -> None:
        await self._group_commit.submit(lambda: self._recorder.amend(exchange_id, status, delivered))

    async def set_policy_versions(self, versions: Mapping[str, int]) -> None:
        await self._group_commit.submit(lambda: self._recorder.set_policy_versions(versions))

    async def read_policy_versions(self) -> dict[str, int]:
        return await self._read(self._reader.read_policy_versions)

    async def find_session(self, session_id: str) -> Session | None:
        return await self._read(lambda: self._reader.find_session(session_id))

    async def find_accepted_session(self, run: str, task_id: str, work_id: int) -> str | None:
        return await self._read(lambda: self._reader.find_accepted_session(run, task_id, work_id))

    async def find_session_by_key(self, key_hash: bytes) -> Session | None:
        return await self._read(lambda: self._reader.find_session_by_key(key_hash))

    async def list_sessions(self, *, limit: int = 100, before: str | None = None) -> list[Session]:
        return await self._read(lambda: self._reader.list_sessions(limit, before))

    async def read_exchanges(self, session_id: str) -> AsyncIterator[Exchange]:
        scan = self._reader.scan_exchanges(session_id)
        while batch := await self._read(scan.read_batch):
            for exchange in batch:
                yield exchange

    async def read_sessions(self, session_ids: Iterable[str | None]) -> AsyncIterator[list[SessionRecord]]:
        batches = self._reader.read_sessions(session_ids)
        while (batch := await self._read(lambda: next(batches, None))) is not None:
            if batch:
                yield batch

    async def export_session(self, session_id: str) -> bytes:
        return await self._read(lambda: self._reader.export_session(session_id))

    async def import_session(self, data: bytes) -> str:
        copy = await asyncio.to_thread(session_copy.unpack, data)
        return await self._group_commit.submit(lambda: self._recorder.import_copy(copy))

    async def read_context_ids(self, session_id: str, seq: int) -> TokenIds:
        return await self._read(lambda: self._reader.read_context_ids(session_id, seq))

    async def read_usage_totals(self, session_id: str) -> UsageTotals:
        return await self._read(lambda: self._reader.read_usage_totals(session_id))

    async def read_next_seq(self, session_id: str) -> int:
        return await self._read(lambda: self._reader.read_next_seq(session_id))

    async def close(self) -> None:
        """Writes what is waiting, then closes. It may be called again."""
        self._closed = True
        await self._group_commit.close()
        await asyncio.to_thread(self._reader_threads.shutdown)
        self._readers.close()

    async def _read(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise make_store_closed_error()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader_threads, work)
        except self._readers.driver_error as error:
            raise self._readers.to_store_error(error) from error
        except ValueError as error:  # msgspec's among them
            raise make_damaged_store_error(f"{self._location}: {error}") from error

"""Reads the results of a run in the order in which they ended, page by page, from a cursor.

At most one page is in memory, and the next one is requested when it is used up: the rest stays at the server while a
trainer is busy. A page depends on its cursor alone, so nothing is lost or repeated when connections break or servers
restart.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypedDict, TypeVar

import msgspec
from msgspec import Raw, Struct

from polar.client.calls import Calls, ClientError, Query
from polar.records.result import SuspiciousFilter

T = TypeVar("T")


class RawResult(Struct, frozen=True):
    """A result as the server sent it: undecoded JSON."""

    cursor: int
    task_id: str
    data: bytes


class ResultOptions(TypedDict, total=False):
    """Options of `AsyncClient.results`, which documents them."""

    builder: str | None
    suspicious: SuspiciousFilter
    consumer: str | None
    limit: int
    wait: float
    count: int | None
    follow: bool


class _Page(Struct):
    results: list[Raw]
    cursor: int


class _ResultKey(Struct):
    cursor: int
    task_id: str


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_key = msgspec.json.Decoder(_ResultKey).decode
_match_key = re.compile(rb'\{"cursor":(\d+),"sample":\d+,"session_id":"[^"\\]*","task_id":("(?:[^"\\]|\\.)*")').match


def _read_key(data: bytes) -> _ResultKey:
    """Reads the cursor and task id, which Polar's server puts first, without decoding the rest."""
    match = _match_key(data)
    return _decode_key(data) if match is None else _ResultKey(int(match[1]), msgspec.json.decode(match[2], type=str))


class Results(Generic[T]):
    """An async iterator of results, possibly endless. After a ClientError, iteration can be continued.

    With a `consumer`, the server stores the cursor: requesting the next page acknowledges all of this one. A consumer
    that stops within a page gets the whole page again, unless it calls `acknowledge`.
    """

    def __init__(
        self,
        calls: Calls,
        query: Query,
        decode: Callable[[RawResult], T],
        after: int | None = None,
        *,
        builder: str | None = None,
        suspicious: SuspiciousFilter = "keep",
        consumer: str | None = None,
        limit: int = 32,
        wait: float = 30,
        count: int | None = None,
        follow: bool = True,
    ) -> None:
        self.cursor = after  # of the last result returned
        self._calls = calls
        filter_ = None if suspicious == "keep" else suspicious
        self._query: Query = {**query, "builder": builder, "suspicious": filter_, "consumer": consumer}
        self._decode = decode
        self._after = after  # where the next page begins
        self._limit = limit
        self._wait = wait if follow else 0.0
        self._remaining = count
        self._follow = follow
        self._page: deque[RawResult] = deque()
        self._lock = asyncio.Lock()
        self._request: asyncio.Task[_Page] | None = None
        self._closed = False

    def __aiter__(self) -> "Results[T]":
        return self

    async def __anext__(self) -> T:
        while self.has_result or await self.wait_for_result():
            if self.has_result:  # no concurrent caller took it
                return self.take()
        raise StopAsyncIteration

    async def __aenter__(self) -> "Results[T]":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the iteration, also for concurrent waiters."""
        self._closed = True
        if self._request is not None:
            self._request.cancel()

    async def acknowledge(self) -> None:
        """Acknowledges all results returned so far."""
        if self.cursor is not None and self._query.get("consumer") is not None:
            await self._fetch_page(self.cursor, limit=1, wait=0.0)

    @property
    def has_result(self) -> bool:
        """Whether `take` has a result now."""
        return bool(self._page) and not self._closed

    async def wait_for_result(self) -> bool:
        """Waits until `take` has a result; False at the end."""
        async with self._lock:
            while not self._page and not self._closed:
                if self._remaining == 0:
                    await self.acknowledge()
                    return False
                limit = self._limit if self._remaining is None else min(self._limit, self._remaining)
                page = await self._fetch_page(self._after, limit=limit, wait=self._wait)
                if page is None:
                    return False
                self._page.extend(self._check_order(page))
                self._after = page.cursor
                if not page.results and not self._follow:
                    return False
            return not self._closed

    def take(self) -> T:
        """The next result of the page; IndexError where there is none."""
        result = self._page[0]
        value = self._decode(result)
        self._page.popleft()
        self.cursor = result.cursor
        if self._remaining is not None:
            self._remaining -= 1
        return value

    async def _fetch_page(self, after: int | None, *, limit: int, wait: float) -> _Page | None:
        query = {**self._query, "after": after, "limit": limit, "wait": wait}
        call = self._calls.call("GET", "/rollout/results", query, decode=_decode_page, wait=wait)
        self._request = request = asyncio.ensure_future(call)
        try:
            await asyncio.wait({request})
        finally:
            request.cancel()
            self._request = None
        return None if request.cancelled() else request.result()  # cancelled: by `aclose`

    def _check_order(self, page: _Page) -> list[RawResult]:
        """Raises ClientError where the server repeats a result, which would be trained on twice."""
        results = []
        last = self._after
        for raw in page.results:
            data = bytes(raw)
            key = _read_key(data)
            if last is not None and key.cursor <= last:
                raise ClientError(f"{self._calls.url} gave the result {key.cursor} after {last}, out of order.")
            last = key.cursor
            results.append(RawResult(key.cursor, key.task_id, data))
        return results

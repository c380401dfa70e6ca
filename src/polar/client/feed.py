"""The results of a run in the order in which they ended, page by page, from a cursor on.

At most one page is held, and the next one is asked for when it is used up: a trainer that can't keep up leaves the
rest at the server. The cursor is all that a page needs, so that nothing is lost or given twice however often
connections break and servers start anew.
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
    """A result as the server sent it: JSON that nobody has looked into."""

    cursor: int
    task_id: str
    data: bytes


class ResultOptions(TypedDict, total=False):
    """Of `results`, which says what they mean."""

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
    """A server of ours says it first; the rest, a megabyte perhaps, need not be looked through."""
    begins = _match_key(data)
    return _decode_key(data) if begins is None else _ResultKey(int(begins[1]), msgspec.json.decode(begins[2], type=str))


class Results(Generic[T]):
    """An async iterator, perhaps without an end. Where it raises ClientError, it can be asked again, and goes on.

    With a `consumer`, the server remembers how far it got: asking for the next page says that all of this one is done
    with. Whoever stops in between gets the rest of the page again, and with it what was given already, unless it
    calls `acknowledge`.
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
        self.cursor = after  # of the one that was given last
        self._calls = calls
        only = None if suspicious == "keep" else suspicious
        self._query: Query = {**query, "builder": builder, "suspicious": only, "consumer": consumer}
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
            if self.has_result:  # and nobody else took it
                return self.take()
        raise StopAsyncIteration

    async def __aenter__(self) -> "Results[T]":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends it, for whoever waits for the next one as well."""
        self._closed = True
        if self._request is not None:
            self._request.cancel()

    async def acknowledge(self) -> None:
        """Tells the server that all that was given so far is done with."""
        if self.cursor is not None and self._query.get("consumer") is not None:
            await self._fetch_page(self.cursor, limit=1, wait=0.0)

    @property
    def has_result(self) -> bool:
        """Whether there is something to take right now."""
        return bool(self._page) and not self._closed

    async def wait_for_result(self) -> bool:
        """Waits until there is something to take; false at the end."""
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
        """The next one of the page; IndexError where there is none."""
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
        self._request = asking = asyncio.ensure_future(call)
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            self._request = None
        return None if asking.cancelled() else asking.result()  # cancelled: by `aclose`

    def _check_order(self, page: _Page) -> list[RawResult]:
        """Raises ClientError where the server gives something twice, which would be trained on twice."""
        results = []
        last = self._after
        for one in page.results:
            data = bytes(one)
            head = _read_key(data)
            if last is not None and head.cursor <= last:
                raise ClientError(f"{self._calls.url} gave the result {head.cursor} after {last}, out of order.")
            last = head.cursor
            results.append(RawResult(head.cursor, head.task_id, data))
        return results

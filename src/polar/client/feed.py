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
from polar.rollout.models import SuspiciousFilter

T = TypeVar("T")


class RawResult(Struct, frozen=True):
    """A result as the server sent it: JSON that nobody has looked into."""

    cursor: int
    task_id: str
    data: bytes


class Options(TypedDict, total=False):
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


class _Head(Struct):
    cursor: int
    task_id: str


_page = msgspec.json.Decoder(_Page).decode
_head = msgspec.json.Decoder(_Head).decode
_begins = re.compile(rb'\{"cursor":(\d+),"sample":\d+,"session_id":"[^"\\]*","task_id":("(?:[^"\\]|\\.)*")').match


def _head_of(data: bytes) -> _Head:
    """A server of ours says it first; the rest, a megabyte perhaps, need not be looked through."""
    begins = _begins(data)
    return _head(data) if begins is None else _Head(int(begins[1]), msgspec.json.decode(begins[2], type=str))


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
        made: Callable[[RawResult], T],
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
        self._made = made
        self._after = after  # where the next page begins
        self._limit = limit
        self._wait = wait if follow else 0.0
        self._left = count
        self._follow = follow
        self._page: deque[RawResult] = deque()
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[_Page] | None = None
        self._closed = False

    def __aiter__(self) -> "Results[T]":
        return self

    async def __anext__(self) -> T:
        while self.waiting or await self.more():
            if self.waiting:  # and nobody else took it
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
        if self._asking is not None:
            self._asking.cancel()

    async def acknowledge(self) -> None:
        """Tells the server that all that was given so far is done with."""
        if self.cursor is not None and self._query.get("consumer") is not None:
            await self._ask(self.cursor, limit=1, wait=0.0)

    @property
    def waiting(self) -> bool:
        """Whether there is something to take right now."""
        return bool(self._page) and not self._closed

    async def more(self) -> bool:
        """Waits until there is something to take; false at the end."""
        async with self._turn:
            while not self._page and not self._closed:
                if self._left == 0:
                    await self.acknowledge()
                    return False
                limit = self._limit if self._left is None else min(self._limit, self._left)
                page = await self._ask(self._after, limit=limit, wait=self._wait)
                if page is None:
                    return False
                self._page.extend(self._checked(page))
                self._after = page.cursor
                if not page.results and not self._follow:
                    return False
            return not self._closed

    def take(self) -> T:
        """The next one of the page; IndexError where there is none."""
        result = self._page[0]
        made = self._made(result)
        self._page.popleft()
        self.cursor = result.cursor
        if self._left is not None:
            self._left -= 1
        return made

    async def _ask(self, after: int | None, *, limit: int, wait: float) -> _Page | None:
        query = {**self._query, "after": after, "limit": limit, "wait": wait}
        call = self._calls.call("GET", "/rollout/results", query, decode=_page, wait=wait)
        self._asking = asking = asyncio.ensure_future(call)
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            self._asking = None
        return None if asking.cancelled() else asking.result()  # cancelled: by `aclose`

    def _checked(self, page: _Page) -> list[RawResult]:
        """Raises ClientError where the server gives something twice, which would be trained on twice."""
        results = []
        last = self._after
        for one in page.results:
            data = bytes(one)
            head = _head_of(data)
            if last is not None and head.cursor <= last:
                raise ClientError(f"{self._calls.url} gave the result {head.cursor} after {last}, out of order.")
            last = head.cursor
            results.append(RawResult(head.cursor, head.task_id, data))
        return results

"""The client for programs without an event loop, and for those that can't wait in theirs (a notebook's).

with polar.Client("http://127.0.0.1:8080", token) as client:
    client.submit("tasks/")
    for result in client.results(consumer="trainer"):
        ...
"""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, Literal, TypeVar, Unpack, overload

from polar.client.async_client import AsyncClient
from polar.client.calls import ClientError, ServerEvent
from polar.client.closeable import Closeable
from polar.client.feed import RawResult, ResultOptions, Results
from polar.client.submission import SubmitAnswer, TaskLike
from polar.config import DEFAULT_RUN
from polar.records.result import GroupResult, NumberedResult, PauseMode, ResultUnit, SessionResult, TaskStatus

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread of its own, for callers that have none, or have one that they can't wait in.

    The thread does not keep a program from ending.
    """

    def __init__(self, on_close: Callable[[], Coroutine[Any, Any, None]], *, owner: str = "client") -> None:
        """`on_close` is run in the loop, last of all. `owner` is what errors call it."""
        self._on_close = on_close
        self._owner = owner
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name=f"polar-{owner}", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From any other thread. Raises ClientError where it is closed, or is closed meanwhile."""
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise ClientError(f"The {self._owner} is closed.") from None
        except BaseException:  # Ctrl-C, say: nobody waits for it any more
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts it, for callers with an event loop of their own. Raises ClientError as `run` does."""
        with self._lock:
            if not self._open:
                work.close()
                raise ClientError(f"The {self._owner} is closed.")
            if not self._thread.is_alive():
                work.close()
                raise ClientError(f"The {self._owner} was made before this process was forked off: make one here.")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Whoever waits in `run` is let go. More than once is once."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._shut_down())
        finally:
            self._loop.close()

    async def _shut_down(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)
        await self._on_close()
        await self._loop.shutdown_asyncgens()


class SyncResults(Closeable, Generic[T]):
    """`Results` as a plain iterator. Threads may share it: each result goes to one of them."""

    def __init__(self, results: Results[T], client: "Client") -> None:
        self._results = results
        self._client = client  # lives as long as this does
        self._background = client.background
        self._turn = threading.Lock()

    @property
    def cursor(self) -> int | None:
        """Of the one that was given last."""
        return self._results.cursor

    def __iter__(self) -> "SyncResults[T]":
        return self

    def __next__(self) -> T:
        with self._turn:  # taken here, in the thread that asked: what is interrupted while it waits loses nothing
            if not self._results.has_result and not self._background.run(self._results.wait_for_result()):
                raise StopIteration
            return self._results.take()

    def close(self) -> None:
        """Ends it, for a thread that waits for the next one as well."""
        with contextlib.suppress(ClientError):  # the client is closed, and so is this
            self._background.run(self._results.aclose())

    def acknowledge(self) -> None:
        """Tells the server that all that was given so far is done with."""
        self._background.run(self._results.acknowledge())


class Client(Closeable):
    """Use as a context manager, or close it. Threads may share it. Every method is AsyncClient's, which says more."""

    def __init__(self, url: str, token: str | None = None, run: str = DEFAULT_RUN, *, patience: float = 300) -> None:
        self._client = AsyncClient(url, token, run, patience=patience)
        self.background = BackgroundLoop(self._client.close)
        self._finalizer = weakref.finalize(self, self.background.close)

    @property
    def run(self) -> str:
        return self._client.run

    def __repr__(self) -> str:
        return repr(self._client).removeprefix("Async")

    def close(self) -> None:
        self._finalizer()

    # tasks

    def submit(
        self,
        tasks: TaskLike | Iterable[TaskLike],
        *,
        raise_refused: bool = True,
        timeout: float | None = None,
        on_answer: Callable[[SubmitAnswer], object] = lambda _: None,
    ) -> list[SubmitAnswer]:
        """`on_answer` is called in the client's own thread."""
        return self.background.run(
            self._client.submit(tasks, raise_refused=raise_refused, timeout=timeout, on_answer=on_answer)
        )

    def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        return self.background.run(self._client.task(task_id, results=results))

    def cancel(self, task_id: str) -> TaskStatus:
        return self.background.run(self._client.cancel(task_id))

    def as_completed(self, task_ids: Iterable[str], *, timeout: float | None = None) -> Iterator[TaskStatus]:
        return self._iterate(self._client.as_completed(task_ids, timeout=timeout))

    def wait(self, task_ids: str | Iterable[str], *, timeout: float | None = None) -> list[SessionResult]:
        return self.background.run(self._client.wait(task_ids, timeout=timeout))

    def trajectory(self, task_id: str) -> dict[str, Any]:
        return self.background.run(self._client.trajectory(task_id))

    # results

    @overload
    def results(
        self,
        after: int | None = None,
        unit: Literal["session"] = "session",
        *,
        raw: Literal[False] = False,
        **options: Unpack[ResultOptions],
    ) -> SyncResults[NumberedResult]: ...

    @overload
    def results(
        self,
        after: int | None = None,
        *,
        unit: Literal["group"],
        raw: Literal[False] = False,
        **options: Unpack[ResultOptions],
    ) -> SyncResults[GroupResult]: ...

    @overload
    def results(
        self,
        after: int | None = None,
        unit: ResultUnit = "session",
        *,
        raw: Literal[True],
        **options: Unpack[ResultOptions],
    ) -> SyncResults[RawResult]: ...

    def results(self, after: int | None = None, unit: Any = "session", **options: Any) -> SyncResults[Any]:
        return SyncResults(self._client.results(after, unit, **options), self)

    def events(self) -> Iterator[ServerEvent]:
        return self._iterate(self._client.events())

    def _iterate(self, events: AsyncGenerator[T, None]) -> Iterator[T]:
        async def one() -> list[T]:
            async for event in events:
                return [event]
            return []

        try:
            while event := self.background.run(one()):
                yield event[0]
        finally:
            with contextlib.suppress(ClientError):  # the client is closed, and so are they
                self.background.run(events.aclose())

    # sessions of harnesses that are run by hand

    def new_session(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.background.run(self._client.new_session(metadata))

    def end_session(self, session_id: str, *, reward: float | None = None, reason: str | None = None) -> dict[str, Any]:
        return self.background.run(self._client.end_session(session_id, reward=reward, reason=reason))

    # the service

    def health(self) -> dict[str, Any]:
        return self.background.run(self._client.health())

    def status(self) -> dict[str, Any]:
        return self.background.run(self._client.status())

    def nodes(self) -> list[dict[str, Any]]:
        return self.background.run(self._client.nodes())

    def set_quotas(
        self,
        *,
        max_running: int | None = None,
        max_queued: int | None = None,
        batch: int | None = None,
        max_lag: int | None = None,
    ) -> dict[str, Any]:
        return self.background.run(
            self._client.set_quotas(max_running=max_running, max_queued=max_queued, batch=batch, max_lag=max_lag)
        )

    # the policy and its engines

    def policy(self) -> dict[str, Any]:
        return self.background.run(self._client.policy())

    def set_policy(self, version: int, replica: str | None = None) -> dict[str, Any]:
        return self.background.run(self._client.set_policy(version, replica))

    def pause(self, mode: PauseMode = "freeze", *, timeout: float = 600) -> dict[str, Any]:
        return self.background.run(self._client.pause(mode, timeout=timeout))

    def resume(self) -> dict[str, Any]:
        return self.background.run(self._client.resume())

    def engines(self) -> dict[str, Any]:
        return self.background.run(self._client.engines())

    def add_engine(self, url: str, version: int | None = None) -> dict[str, Any]:
        return self.background.run(self._client.add_engine(url, version))

    def remove_engine(self, url: str) -> dict[str, Any]:
        return self.background.run(self._client.remove_engine(url))

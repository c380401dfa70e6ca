"""An event loop whose time is not real, and processes in it that can be frozen and killed.

Time stands still while anything is ready to run, then jumps to the next timer. A process is everything that was
started in its context: every callback and every step of a task knows whose it is. What a frozen one would do waits
until it goes on; what a dead one would do never happens, not even its `finally`, as after a SIGKILL.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

_SPIN = 50_000  # steps without any time that passes


class Hang(AssertionError):
    """Nothing can happen any more, or the same happens without end."""


class Process:
    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.loop = loop
        self.name = name
        self.frozen = False
        self.dead = False
        self.waiting: list[asyncio.Handle] = []  # what happens when it goes on, should it ever
        self.tasks: set[asyncio.Task[Any]] = set()
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return self._context.copy().run(self.loop.create_task, work)

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Where it is frozen: as soon as it is not."""
        self.loop.call_soon(call, *arguments, context=self._context.copy())

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        waiting, self.waiting = self.waiting, []
        self.loop.again(waiting)

    def kill(self) -> None:
        self.dead = True


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Future(asyncio.Future[Any]):
    """Sets of them have an order that is the same each time."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, failed: Callable[[str], None]) -> None:
        """`failed` hears of errors that nobody takes care of."""
        super().__init__()
        self._numbers = 0
        self._told = failed
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._now = 0.0
        self._steps = 0  # since time passed
        self._everything: list[asyncio.Task[Any]] = []
        self.nobody = copy_context()  # the world's own callbacks: no process's
        self.set_task_factory(self._made)
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def later(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """A callback of the world's, whoever asks for it."""
        return self.call_later(seconds, call, *arguments, context=self.nobody)

    def again(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Hang("Everybody waits, and nobody for a time.")
            self._now, self._steps = max(self._now, timers[0][0]), 0
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])
        self._steps += len(ready)
        if self._steps > _SPIN:
            raise Hang(f"Something spins: {ready[0]!r}.")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and (process.frozen or process.dead):
                process.waiting.append(handle)
                continue
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """They are dropped when their time comes."""

    def _write_to_self(self) -> None:
        """All callers are in this thread."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future

    def _made(self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> "asyncio.Task[Any]":
        task = _Task.__new__(_Task)
        self._numbers += 1
        task.number = self._numbers  # before anybody hashes it
        task.__init__(work, loop=loop, context=context)  # type: ignore[misc]
        self._everything.append(task)
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        future = _Future(loop=self)
        self._numbers += 1
        future.number = self._numbers
        return future

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._told(f"{context.get('message')}: {context.get('exception')!r}")

    def end(self, processes: list[Process]) -> None:
        """Lets go of all that still is, the dead included, so that nothing is left to the garbage collector."""
        self.set_exception_handler(lambda *_: None)
        for process in processes:
            process.dead = False
            process.thaw()
        for _ in range(20):
            left = [task for task in self._everything if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.call_later(1e-9, self.stop, context=self.nobody)
            self.run_forever()
        for task in self._everything:
            if task.done() and not task.cancelled():
                task.exception()
        self.close()


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work

"""An event loop whose time is not real, and processes in it that can be frozen and killed.

Time stands still while anything is ready to run, then jumps to the next timer. A process is everything that was
started in its context: every callback and every step of a task knows whose it is. What a frozen one would do waits
until it goes on; what a dead one would do never happens, not even its `finally`, as after a SIGKILL.
"""

import asyncio
import heapq
from collections import deque
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
        self.still = False  # either
        self.waiting: list[Handle] = []  # what happens when it goes on, should it ever
        self.tasks: set[asyncio.Task[Any]] = set()
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = self.loop.create_task(work, context=self._context.copy())
        return task

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Where it is frozen: as soon as it is not."""
        self.loop.call_soon(call, *arguments, context=self._context.copy())

    def freeze(self) -> None:
        self.frozen = self.still = True

    def thaw(self) -> None:
        self.frozen, self.still = False, self.dead
        waiting, self.waiting = self.waiting, []
        self.loop.again(waiting)

    def kill(self) -> None:
        self.dead = self.still = True


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Future(asyncio.Future[Any]):
    """Sets of them have an order that is the same each time."""

    number = 0

    def __hash__(self) -> int:
        if not self.number:
            self.number = self._loop.number()  # type: ignore[attr-defined]
        return self.number


class _Task(asyncio.Task[Any]):
    number = 0

    def __hash__(self) -> int:
        if not self.number:
            self.number = self._loop.number()  # type: ignore[attr-defined]
        return self.number


class Handle:
    """A call that is to be made, now or at a time: as asyncio's, without what nobody asks it here."""

    __slots__ = ("_when", "arguments", "call", "context", "dropped")

    def __init__(self, call: Any, arguments: tuple[Any, ...], context: Context | None, when: float) -> None:
        self.call = call
        self.arguments = arguments
        self.context = copy_context() if context is None else context
        self.dropped = False
        self._when = when

    def cancel(self) -> None:
        self.dropped = True
        self.call, self.arguments = None, ()

    def cancelled(self) -> bool:
        return self.dropped

    def when(self) -> float:
        return self._when


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, crashed: Callable[[str, object], None]) -> None:
        """`crashed` hears of errors that nobody takes care of."""
        super().__init__()
        self._numbers = 0
        self._crashed = crashed
        self._soon: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._now = 0.0
        self._everything: list[asyncio.Task[Any]] = []
        self.nobody = copy_context()  # the world's own callbacks: no process's
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._now

    def number(self) -> int:
        """The next one."""
        self._numbers += 1
        return self._numbers

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context, self._now)
        self._soon.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context, when)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def later(self, seconds: float, call: Callable[..., object], *arguments: Any) -> Handle:
        """A callback of the world's, whoever asks for it."""
        handle = Handle(call, arguments, self.nobody, self._now + seconds)
        self._numbers += 1
        heapq.heappush(self._timers, (handle._when, self._numbers, handle))
        return handle

    def again(self, handles: list[Handle]) -> None:
        self._soon.extend(handles)

    def _run_once(self) -> None:
        """Not once: until somebody stops it."""
        ready, timers, steps = self._soon, self._timers, 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                while timers and timers[0][2].dropped:
                    heapq.heappop(timers)
                if not timers:
                    raise Hang("Everybody waits, and nobody for a time.")
                self._now, steps = max(self._now, timers[0][0]), 0
                while timers and timers[0][0] <= self._now:
                    ready.append(heapq.heappop(timers)[2])
            steps += 1
            if steps > _SPIN:
                raise Hang(f"Something spins: {ready[0].call!r}.")
            handle = ready.popleft()
            if handle.dropped:
                continue
            process = handle.context.get(PROCESS)
            if process is not None and process.still:
                process.waiting.append(handle)
                continue
            try:
                handle.context.run(handle.call, *handle.arguments)
            except Exception as error:  # noqa: BLE001 - nobody else takes care of it
                self.call_exception_handler({"message": repr(handle.call), "exception": error})

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

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task = _Task(coro, loop=self, name=name or "-", context=context)
        self._everything.append(task)
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._crashed(str(context.get("message")), context.get("exception"))

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
        self._everything.clear()
        self._timers.clear()
        self._soon.clear()
        self.close()


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work

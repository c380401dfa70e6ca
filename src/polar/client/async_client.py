"""The rollout service, as programs speak to it.

    async with AsyncClient("http://127.0.0.1:8080", token) as client:
        await client.submit("tasks/")
        async for result in client.results(consumer="trainer"):
            ...

It needs nothing but an HTTP client and the wire models: no engine, no store and no server of ours is imported here.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Literal, TypeVar, Unpack, overload

import msgspec
from pydantic import BaseModel, ValidationError

from polar import problems
from polar.client import submitting
from polar.client.calls import BUSY, Calls, ClientError, Event, Query, step
from polar.client.feed import Options, RawResult, Results
from polar.client.given import TaskLike, tasks_of
from polar.client.submitting import Answer, TasksRefused
from polar.closing import AsyncClosing
from polar.config import DEFAULT_RUN
from polar.rollout.models import GroupResult, NumberedResult, PauseMode, SessionResult, TaskStatus, Unit

__all__ = ["BUSY", "Answer", "AsyncClient", "ClientError", "Event", "RawResult", "Results", "TasksRefused"]

M = TypeVar("M", bound=BaseModel)
_AT_ONCE = 16  # tasks that are asked about at the same time
_QUICKEST, _SLOWEST = 0.2, 5.0  # seconds between two looks at tasks that run

_table = msgspec.json.Decoder(dict[str, Any]).decode
_tables = msgspec.json.Decoder(list[dict[str, Any]]).decode


class AsyncClient(AsyncClosing):
    """Use as an async context manager, or close it. All calls are of one run."""

    def __init__(self, url: str, token: str | None = None, run: str = DEFAULT_RUN, *, patience: float = 300) -> None:
        """`patience` is how many seconds a call goes on trying while the server can't be reached."""
        self.run = run
        self._calls = Calls(url, token, patience)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._calls.url!r}, run={self.run!r})"

    async def close(self) -> None:
        await self._calls.close()

    # tasks

    async def submit(
        self,
        tasks: TaskLike | Iterable[TaskLike],
        *,
        raise_refused: bool = True,
        timeout: float | None = None,
        seen: Callable[[Answer], object] = lambda _: None,
    ) -> list[Answer]:
        """Tasks, or files and folders of them; the server's answers, in their order. A task that the server has already
        is not run again. While the run's queue is full this waits, `timeout` seconds at most. Raises TasksRefused when
        all are told, unless `raise_refused` is false. `seen` hears each answer as it comes; one with the code 429 is of
        a task that there is no room for yet."""
        answers = await submitting.submit(self._calls, tasks_of(tasks, run=self.run), timeout, seen)
        if raise_refused:
            submitting.check(answers)
        return answers

    async def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        """How far it is, with the results that there are by now."""
        query: Query = {"run": self.run, "results": None if results else "false"}
        data = await self._calls.call("GET", f"/rollout/task/{step(task_id)}", query, decode=_json)
        return _valid(TaskStatus, data, f"the task {task_id!r}")

    async def cancel(self, task_id: str) -> TaskStatus:
        """The task as it is then, without its results; `cancelled_sessions` are those that this ends."""
        query: Query = {"run": self.run, "results": "false"}
        data = await self._calls.call("DELETE", f"/rollout/task/{step(task_id)}", query, decode=_json)
        return _valid(TaskStatus, data, f"the task {task_id!r}")

    async def ended(
        self,
        task_ids: Iterable[str],
        *,
        timeout: float | None = None,
        seen: Callable[[TaskStatus], object] = lambda _: None,
    ) -> AsyncGenerator[TaskStatus, None]:
        """Each of these tasks as soon as all of it has ended, with its results; `seen` hears how far each is, at every
        look."""
        deadline = None if timeout is None else time.monotonic() + timeout
        running = wanted = list(dict.fromkeys(task_ids))
        pause = _QUICKEST
        while running:
            began = time.monotonic()
            ended = await self._ended(running, seen)
            took = time.monotonic() - began
            for task_id in ended:
                yield await self.task(task_id)
            running = [task_id for task_id in running if task_id not in ended]
            if running and deadline is not None and time.monotonic() >= deadline:
                many = f"{len(running)} of {len(wanted)} tasks"
                raise ClientError(f"{many} still run after {timeout:g} s, {running[0]!r} among them.")
            if running:
                await asyncio.sleep(max(pause, 4 * took))  # however many they are, the server has other things to do
            pause = _QUICKEST if ended else min(1.5 * pause, _SLOWEST)

    async def wait(self, task_ids: str | Iterable[str], *, timeout: float | None = None) -> list[SessionResult]:
        """The results of these tasks when all of them have ended, in the order of the tasks. Raises ClientError where
        that takes more than `timeout` seconds."""
        wanted = [task_ids] if isinstance(task_ids, str) else list(task_ids)
        ended = {task.task_id: task.results async for task in self.ended(wanted, timeout=timeout)}
        return [result for task_id in wanted for result in ended[task_id]]

    async def trajectory(self, task_id: str) -> dict[str, Any]:
        """All sessions of the task in one tree of tokens."""
        return await self._call("GET", f"/rollout/task/{step(task_id)}/trajectory")

    async def _ended(self, task_ids: list[str], seen: Callable[[TaskStatus], object]) -> list[str]:
        ended = []
        for first in range(0, len(task_ids), _AT_ONCE):
            some = task_ids[first : first + _AT_ONCE]
            found = await asyncio.gather(*(self.task(task_id, results=False) for task_id in some))
            for task in found:
                seen(task)
            ended += [task_id for task_id, task in zip(some, found, strict=True) if task.status != "running"]
        return ended

    # results

    @overload
    def results(
        self,
        after: int | None = None,
        unit: Literal["session"] = "session",
        *,
        raw: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Results[NumberedResult]: ...

    @overload
    def results(
        self,
        after: int | None = None,
        *,
        unit: Literal["group"],
        raw: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Results[GroupResult]: ...

    @overload
    def results(
        self, after: int | None = None, unit: Unit = "session", *, raw: Literal[True], **options: Unpack[Options]
    ) -> Results[RawResult]: ...

    def results(
        self, after: int | None = None, unit: Unit = "session", *, raw: bool = False, **options: Unpack[Options]
    ) -> Results[Any]:
        """Sessions (or whole tasks) in the order in which they ended, each once; it waits for further ones.

        after      the cursor to go on from; default: the beginning, or where the consumer is
        builder    of the trajectories; default: as the tasks say
        suspicious "only" sessions with proven evidence of tampering, or "exclude" them; default: "keep" all
        consumer   a name under which the server remembers what was taken
        raw        results as JSON that is not looked into
        limit      results of one page, which is all that is read ahead; default: 32
        wait       seconds that the server may hold an empty answer back, 60 at most; default: 30
        count      ends after so many
        follow     false: ends where there are no further ones now
        """
        made = _raw if raw else _group if unit == "group" else _session
        return Results(self._calls, {"run": self.run, "unit": unit}, made, after, **options)

    def events(self) -> AsyncGenerator[Event, None]:
        """What happens at the server from now on. An event `lagged` says that some are lost; results never are."""
        return self._calls.events("/events", {"run": self.run})

    # sessions of harnesses that are run by hand

    async def new_session(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Its `session_id`, its `api_key`, which is told only here, and `base_urls` of the gateway. Where the answer is
        lost this is an error, since another session would be opened."""
        body = _encoded({"metadata": metadata or {}, "run": self.run})
        return await self._calls.call("POST", "/sessions", body=body, decode=_table, once=True)

    async def end_session(
        self, session_id: str, *, reward: float | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """Its key stops working. It has a reward, or a reason why it has none; or gets one later."""
        body = _encoded({"reward": reward, "reason": reason})
        return await self._calls.call("POST", f"/sessions/{step(session_id)}/end", body=body, decode=_table)

    # the service

    async def health(self) -> dict[str, Any]:
        """Raises ClientError at once where nothing answers. `status` is "ok", or "degraded" with a `reason`: then the
        service answers, but can't write."""
        return await self._calls.call("GET", "/health", decode=_table, patience=0, accept=503)

    async def status(self) -> dict[str, Any]:
        return await self._calls.call("GET", "/rollout/status", decode=_table)

    async def nodes(self) -> list[dict[str, Any]]:
        return await self._calls.call("GET", "/nodes", decode=_tables)

    async def set_quotas(
        self,
        *,
        max_running: int | None = None,
        max_queued: int | None = None,
        batch: int | None = None,
        max_lag: int | None = None,
    ) -> dict[str, Any]:
        """All four of the run; None is none."""
        quotas = {"max_running": max_running, "max_queued": max_queued, "batch": batch, "max_lag": max_lag}
        return await self._calls.call("PUT", f"/runs/{step(self.run)}", body=msgspec.json.encode(quotas), decode=_table)

    # the policy and its engines

    async def policy(self) -> dict[str, Any]:
        return await self._call("GET", "/policy")

    async def set_policy(self, version: int, replica: str | None = None) -> dict[str, Any]:
        """The weights have changed: of one replica, or of all."""
        return await self._call("POST", "/policy", {"version": version, "replica": replica})

    async def pause(self, mode: PauseMode = "freeze", *, timeout: float = 600) -> dict[str, Any]:
        """Generation stands still on return. `timeout`: seconds to wait for calls that run, where the mode does."""
        return await self._call("POST", "/policy/pause", {"mode": mode, "timeout": timeout}, wait=timeout)

    async def resume(self) -> dict[str, Any]:
        return await self._call("POST", "/policy/resume")

    async def engines(self) -> dict[str, Any]:
        return await self._call("GET", "/engines")

    async def add_engine(self, url: str, version: int | None = None) -> dict[str, Any]:
        return await self._call("POST", "/engines", {"url": url, "version": version})

    async def remove_engine(self, url: str) -> dict[str, Any]:
        return await self._call("DELETE", "/engines", url=url)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, wait: float = 0.0, **query: str
    ) -> dict[str, Any]:
        """Of this run; fields without a value are left out."""
        data = None
        if body is not None:
            data = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
        return await self._calls.call(method, path, {"run": self.run, **query}, data, decode=_table, wait=wait)


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises ClientError for what JSON can't say: NaN must not arrive as nothing."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ClientError(f"This can't be sent as JSON: {error}.") from error


def _json(body: bytes) -> bytes:
    """As it is, if it is whole."""
    return bytes(msgspec.json.decode(body, type=msgspec.Raw))


def _raw(result: RawResult) -> RawResult:
    return result


def _session(result: RawResult) -> NumberedResult:
    return _valid(NumberedResult, result.data, f"the result {result.cursor}")


def _group(result: RawResult) -> GroupResult:
    return _valid(GroupResult, result.data, f"the result {result.cursor}")


def _valid(model: type[M], data: bytes, what: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        wrong = problems.listed(error, whole="all of it")
        raise ClientError(
            f"{what} is not as this client knows it ({wrong}): is the server of another version?"
        ) from error

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

from polar import validation_errors
from polar.client import submission
from polar.client.calls import BUSY, Calls, ClientError, Query, ServerEvent, quote_segment
from polar.client.closeable import AsyncCloseable
from polar.client.feed import RawResult, ResultOptions, Results
from polar.client.submission import SubmitAnswer, TaskLike, TasksRefused, load_tasks
from polar.config import DEFAULT_RUN
from polar.records.policy import PauseMode
from polar.records.result import GroupResult, NumberedResult, ResultUnit, SessionResult, TaskStatus

__all__ = ["BUSY", "AsyncClient", "ClientError", "RawResult", "Results", "ServerEvent", "SubmitAnswer", "TasksRefused"]

M = TypeVar("M", bound=BaseModel)
_MAX_CONCURRENT_REQUESTS = 16  # tasks that are asked about at the same time
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.2, 5.0  # seconds between two looks at tasks that run

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode


class AsyncClient(AsyncCloseable):
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
        on_answer: Callable[[SubmitAnswer], object] = lambda _: None,
    ) -> list[SubmitAnswer]:
        """Tasks, or files and folders of them; the server's answers, in their order. A task that the server has already
        is not run again. While the run's queue is full this waits, `timeout` seconds at most. Raises TasksRefused when
        all are answered, unless `raise_refused` is false. `on_answer` is called with each answer as it comes; one with
        the code 429 is of a task that there is no room for yet."""
        answers = await submission.submit(self._calls, load_tasks(tasks, run=self.run), timeout, on_answer)
        if raise_refused:
            submission.raise_refused(answers)
        return answers

    async def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        """How far it is, with the results that there are by now."""
        query: Query = {"run": self.run, "results": None if results else "false"}
        data = await self._calls.call("GET", f"/rollout/task/{quote_segment(task_id)}", query, decode=_check_json)
        return _validate(TaskStatus, data, f"the task {task_id!r}")

    async def cancel(self, task_id: str) -> TaskStatus:
        """The task as it is then, without its results; `cancelled_sessions` are those that this ends."""
        query: Query = {"run": self.run, "results": "false"}
        data = await self._calls.call("DELETE", f"/rollout/task/{quote_segment(task_id)}", query, decode=_check_json)
        return _validate(TaskStatus, data, f"the task {task_id!r}")

    async def as_completed(
        self,
        task_ids: Iterable[str],
        *,
        timeout: float | None = None,
        on_status: Callable[[TaskStatus], object] = lambda _: None,
    ) -> AsyncGenerator[TaskStatus, None]:
        """Yields each of these tasks as soon as all of it has ended, with its results. `on_status` is called with the
        status of each, at every poll."""
        deadline = None if timeout is None else time.monotonic() + timeout
        running = wanted = list(dict.fromkeys(task_ids))
        pause = _MIN_POLL_SECONDS
        while running:
            began = time.monotonic()
            ended = await self._poll_ended(running, on_status)
            took = time.monotonic() - began
            for task_id in ended:
                yield await self.task(task_id)
            running = [task_id for task_id in running if task_id not in ended]
            if running and deadline is not None and time.monotonic() >= deadline:
                many = f"{len(running)} of {len(wanted)} tasks"
                raise ClientError(f"{many} still run after {timeout:g} s, {running[0]!r} among them.")
            if running:
                await asyncio.sleep(max(pause, 4 * took))  # however many they are, the server has other things to do
            pause = _MIN_POLL_SECONDS if ended else min(1.5 * pause, _MAX_POLL_SECONDS)

    async def wait(self, task_ids: str | Iterable[str], *, timeout: float | None = None) -> list[SessionResult]:
        """The results of these tasks when all of them have ended, in the order of the tasks. Raises ClientError where
        that takes more than `timeout` seconds."""
        wanted = [task_ids] if isinstance(task_ids, str) else list(task_ids)
        ended = {task.task_id: task.results async for task in self.as_completed(wanted, timeout=timeout)}
        return [result for task_id in wanted for result in ended[task_id]]

    async def trajectory(self, task_id: str) -> dict[str, Any]:
        """All sessions of the task in one tree of tokens."""
        return await self._call("GET", f"/rollout/task/{quote_segment(task_id)}/trajectory")

    async def _poll_ended(self, task_ids: list[str], on_status: Callable[[TaskStatus], object]) -> list[str]:
        ended = []
        for first in range(0, len(task_ids), _MAX_CONCURRENT_REQUESTS):
            some = task_ids[first : first + _MAX_CONCURRENT_REQUESTS]
            found = await asyncio.gather(*(self.task(task_id, results=False) for task_id in some))
            for task in found:
                on_status(task)
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
        **options: Unpack[ResultOptions],
    ) -> Results[NumberedResult]: ...

    @overload
    def results(
        self,
        after: int | None = None,
        *,
        unit: Literal["group"],
        raw: Literal[False] = False,
        **options: Unpack[ResultOptions],
    ) -> Results[GroupResult]: ...

    @overload
    def results(
        self,
        after: int | None = None,
        unit: ResultUnit = "session",
        *,
        raw: Literal[True],
        **options: Unpack[ResultOptions],
    ) -> Results[RawResult]: ...

    def results(
        self,
        after: int | None = None,
        unit: ResultUnit = "session",
        *,
        raw: bool = False,
        **options: Unpack[ResultOptions],
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
        made = _keep_raw if raw else _parse_group_result if unit == "group" else _parse_session_result
        return Results(self._calls, {"run": self.run, "unit": unit}, made, after, **options)

    def events(self) -> AsyncGenerator[ServerEvent, None]:
        """What happens at the server from now on. An event `lagged` says that some are lost; results never are."""
        return self._calls.events("/events", {"run": self.run})

    # sessions of harnesses that are run by hand

    async def new_session(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Its `session_id`, its `api_key`, which is told only here, and `base_urls` of the gateway. Where the answer is
        lost this is an error, since another session would be opened."""
        body = _encode_json({"metadata": metadata or {}, "run": self.run})
        return await self._calls.call("POST", "/sessions", body=body, decode=_decode_object, once=True)

    async def end_session(
        self, session_id: str, *, reward: float | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """Its key stops working. It has a reward, or a reason why it has none; or gets one later."""
        body = _encode_json({"reward": reward, "reason": reason})
        return await self._calls.call(
            "POST", f"/sessions/{quote_segment(session_id)}/end", body=body, decode=_decode_object
        )

    # the service

    async def health(self) -> dict[str, Any]:
        """Raises ClientError at once where nothing answers. `status` is "ok", or "degraded" with a `reason`: then the
        service answers, but can't write."""
        return await self._calls.call("GET", "/health", decode=_decode_object, patience=0, accept=503)

    async def status(self) -> dict[str, Any]:
        return await self._calls.call("GET", "/rollout/status", decode=_decode_object)

    async def nodes(self) -> list[dict[str, Any]]:
        return await self._calls.call("GET", "/nodes", decode=_decode_objects)

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
        return await self._calls.call(
            "PUT", f"/runs/{quote_segment(self.run)}", body=msgspec.json.encode(quotas), decode=_decode_object
        )

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
        return await self._calls.call(method, path, {"run": self.run, **query}, data, decode=_decode_object, wait=wait)


def _encode_json(body: dict[str, Any]) -> bytes:
    """Raises ClientError for what JSON can't say: NaN must not arrive as nothing."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ClientError(f"This can't be sent as JSON: {error}.") from error


def _check_json(body: bytes) -> bytes:
    """As it is, if it is whole."""
    return bytes(msgspec.json.decode(body, type=msgspec.Raw))


def _keep_raw(result: RawResult) -> RawResult:
    return result


def _parse_session_result(result: RawResult) -> NumberedResult:
    return _validate(NumberedResult, result.data, f"the result {result.cursor}")


def _parse_group_result(result: RawResult) -> GroupResult:
    return _validate(GroupResult, result.data, f"the result {result.cursor}")


def _validate(model: type[M], data: bytes, what: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        wrong = validation_errors.format_validation_errors(error, subject="all of it")
        raise ClientError(
            f"{what} is not as this client knows it ({wrong}): is the server of another version?"
        ) from error

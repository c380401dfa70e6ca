"""What trainers read of tasks and sessions that have ended, as JSON in pieces.

    rows of the queue + exchanges of the store -> a few results at a time, off the event loop -> bytes

Nothing of it is kept: a result is a view, made anew for whoever asks, with the builder that the task names or with
another one. Nor is a page ever in memory as a whole.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

import msgspec

from polar.plugins import load as load_plugin
from polar.rollout.models import Unit
from polar.rollout.protocol import Ended
from polar.rollout.records import TaskRow, WorkRow
from polar.rollout.results import as_ended, builder_of, ended_result, unbuilt_result
from polar.store.base import Recorded, Store
from polar.trajectory import wire
from polar.trajectory.session import MERGED, TREE, sampled

log = logging.getLogger(__name__)

PAGE = 32 * 1024 * 1024
"""Bytes after which a page ends; it has at least one result."""


_LISTED = 1000
"""Sessions of a task that are shown one by one."""


class Rows(Protocol):
    """What is asked of the rollout server."""

    @property
    def closing(self) -> bool:
        """Nobody is to wait any more."""
        ...

    async def task(self, run: str, task_id: str) -> TaskRow | None: ...

    async def work_of(self, run: str, task_id: str) -> list[WorkRow]: ...

    async def sessions_after(self, run: str, after: int, limit: int) -> list[WorkRow]: ...

    async def groups_after(self, run: str, after: int, limit: int) -> list[TaskRow]: ...

    async def wait(self, run: str, after: int, seconds: float, unit: Unit) -> None: ...


_Pieces = list[tuple[bytes, int | None]]
"""Of a page; and the cursor of the result that ends with it."""


class _View(msgspec.Struct):
    """All that a result is made of."""

    row: WorkRow
    ended: Ended
    builder: str
    recorded: Recorded


_ended = msgspec.json.Decoder(Ended).decode
_encode = msgspec.json.Encoder().encode


class Pages:
    def __init__(self, rows: Rows, store: Store) -> None:
        self._rows = rows
        self._store = store
        self._builders: dict[tuple[str, str], str] = {}

    async def page(
        self, run: str, after: int, *, wait: float, limit: int, unit: Unit, builder: str | None
    ) -> AsyncIterator[bytes]:
        """`{"results": [...], "cursor": ...}`: what has ended after that cursor, in that order. Where there is nothing,
        it waits so long for something."""
        rows = await self._ended(run, after, wait, limit, unit)
        opening = b'{"results":['
        cursor, size = after, 0
        async with contextlib.aclosing(self._pieces(rows, builder)) as several:
            async for pieces in several:
                told = []
                for piece, whole in pieces:
                    told += [opening, piece]
                    size += len(piece)
                    opening = b"" if whole is None else b","
                    cursor = cursor if whole is None else whole
                    if size >= PAGE and whole is not None:
                        break
                yield b"".join(told)
                if size >= PAGE and opening:
                    break
        yield (b"" if size else opening) + b'],"cursor":%d}' % cursor

    async def status(self, task: TaskRow, *, results: bool) -> AsyncIterator[bytes]:
        """A task (models.TaskStatus), with its results where they are wanted and there will be no more."""
        told = {
            "task_id": task.task_id,
            "run": task.run,
            "status": task.state,
            "total_sessions": task.samples,
            "completed_sessions": task.ended,
            "usable_sessions": task.usable,
            "cancelled": task.cancelled,
            "created_at": task.created_at,
            "ended_at": task.ended_at,
            "cursor": task.cursor,
            "result_paths": [],
        }
        rows = await self._rows.work_of(task.run, task.task_id)
        told["sessions"] = [
            {"sample": row.sample, "state": row.state, "attempt": row.attempt, "node": row.node, "id": row.session_id}
            for row in rows[:_LISTED]
        ]
        yield _encode(told)[:-1] + b',"results":['
        if results and task.state != "running":
            async for piece in self._listed(rows, None):
                yield piece
        yield b"]}"

    async def tree(self, task: TaskRow) -> bytes:
        """The token tree over all sessions of a task that there are by now."""
        rows = [row for row in await self._rows.work_of(task.run, task.task_id) if row.summary is not None]
        left, found = iter(rows), []
        async for some in self._store.recorded([row.session_id for row in rows]):
            for one, row in zip(some, left, strict=False):
                if one.session is not None and row.summary is not None and _problem(row, one) is None:
                    judged = as_ended(one.session, _ended(row.summary))
                    found.append(await asyncio.to_thread(sampled, judged, one.exchanges))
        build = load_plugin("builders", TREE)
        return await asyncio.to_thread(lambda: _encode(wire.tree(build(found))))

    async def _ended(self, run: str, after: int, wait: float, limit: int, unit: Unit) -> list[WorkRow] | list[TaskRow]:
        now = asyncio.get_running_loop().time
        deadline = now() + wait
        while True:
            rows = await (
                self._rows.sessions_after(run, after, limit)
                if unit == "session"
                else self._rows.groups_after(run, after, limit)
            )
            left = deadline - now()
            if rows or left <= 0 or self._rows.closing:
                return rows
            await self._rows.wait(run, after, left, unit)

    async def _pieces(self, rows: list[WorkRow] | list[TaskRow], builder: str | None) -> AsyncGenerator[_Pieces, None]:
        async for results in self._sessions([row for row in rows if isinstance(row, WorkRow)], builder):
            yield results
        for task in rows:
            if isinstance(task, TaskRow):
                async for piece in self._group(task, builder):
                    yield [(piece, None)]
                yield [(b"]}", task.cursor)]

    async def _group(self, task: TaskRow, builder: str | None) -> AsyncIterator[bytes]:
        """But for its end."""
        rows = await self._rows.work_of(task.run, task.task_id)
        told = {
            "task_id": task.task_id,
            "run": task.run,
            "status": task.state,
            "asked": task.samples,
            "usable": task.usable,
            "cancelled": sum(_was_cancelled(row, task) for row in rows),
            "cursor": task.cursor,
        }
        yield _encode(told)[:-1] + b',"results":['
        async for piece in self._listed(rows, builder):
            yield piece

    async def _listed(self, rows: list[WorkRow], builder: str | None) -> AsyncIterator[bytes]:
        """Of those that have ended."""
        separator = b""
        async for results in self._sessions([row for row in rows if row.summary is not None], builder):
            yield separator + b",".join(result for result, _ in results)
            separator = b","

    async def _sessions(self, rows: list[WorkRow], builder: str | None) -> AsyncIterator[_Pieces]:
        """models.SessionResult of each, and its place among the others: as many at a time as the store reads in one
        go, since going from thread to thread takes longer than making a short one."""
        left = iter(rows)
        async for some in self._store.recorded([row.session_id for row in rows]):
            views = [await self._view(row, one, builder) for one, row in zip(some, left, strict=False)]
            yield await asyncio.to_thread(_all_built, views)

    async def _view(self, row: WorkRow, recorded: Recorded, builder: str | None) -> _View:
        assert row.summary is not None
        ended = _ended(row.summary)
        return _View(row, ended, builder or ended.builder or await self._builder(row), recorded)

    async def _builder(self, row: WorkRow) -> str:
        """The one that the task names."""
        key = row.run, row.task_id
        found = self._builders.pop(key, None)
        if found is None:
            task = await self._rows.task(*key)
            found = MERGED if task is None else builder_of(task.request)
        self._builders[key] = found
        if len(self._builders) > 1000:
            del self._builders[next(iter(self._builders))]
        return found


def _all_built(views: list[_View]) -> _Pieces:
    return [(_built(view), view.row.cursor) for view in views]


def _built(view: _View) -> bytes:
    row, ended, builder = view.row, view.ended, view.builder
    session, exchanges = view.recorded.session, view.recorded.exchanges
    problem = _problem(row, view.recorded)
    if problem is not None:
        log.error("Session %s can't be told of: %s", row.session_id, problem)
        result = unbuilt_result(row.task_id, row.sample, ended, "session_unreadable", problem)
    else:
        try:
            result = ended_result(row.task_id, row.sample, ended, builder, session, exchanges)
        except Exception as error:  # a builder may be anybody's; what one session does to it must not hide the others
            log.exception("The builder %s failed at session %s", builder, row.session_id)
            why = f"The builder {builder} failed: {error!r}"
            result = unbuilt_result(row.task_id, row.sample, ended, "build_failed", why)
    result["metadata"]["run"] = row.run
    return _encode({"cursor": row.cursor, "sample": row.sample, **result})


def _problem(row: WorkRow, recorded: Recorded) -> str | None:
    """Why the session can't be told of. What a node says of one is believed; but not that another task's is its own."""
    session = recorded.session
    if recorded.damage is not None:
        return recorded.damage
    if session is None:
        return None if row.session_id is None else "the store does not have the session"
    whose = session.run, session.metadata.get("task_id")
    return None if whose == (row.run, row.task_id) else "the session is another task's"


def _was_cancelled(row: WorkRow, task: TaskRow) -> bool:
    reason = None if row.summary is None else _ended(row.summary).reason
    return reason is not None and reason in ("cancelled", task.cancelled)

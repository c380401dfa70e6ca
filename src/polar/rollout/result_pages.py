"""Renders results of ended tasks and sessions for trainers, as JSON in pieces.

    rows of the queue + exchanges of the store -> a few results at a time, off the event loop -> bytes

Results are not stored: each is rendered for every request, with the task's builder or another one. A page is never in
memory as a whole.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
from cachetools import LRUCache

from polar.records import wire
from polar.records.result import ResultUnit, SuspiciousFilter
from polar.records.session import HeldBackError, SessionRecord, is_suspicious
from polar.rollout.protocol import SessionOutcome
from polar.rollout.queue.records import TaskRow, WorkRow
from polar.rollout.results import (
    ResultForm,
    apply_outcome,
    get_task_status,
    parse_result_form,
    render_ended_result,
    render_failed_result,
)
from polar.store.base import Store
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import GroupTree

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 32 * 1024 * 1024
"""Bytes after which a page ends; it has at least one result."""


_MAX_LISTED_SESSIONS = 1000
"""Sessions of a task that its status lists."""

_MAX_FORMS = 1000
"""Cached result forms of tasks."""


class ResultSource(Protocol):
    """What pages need of the rollout service."""

    @property
    def closing(self) -> bool:
        """Whether waits must return at once."""
        ...

    async def get_task(self, run: str, task_id: str) -> TaskRow | None: ...

    async def list_task_work(self, run: str, task_id: str) -> list[WorkRow]: ...

    async def list_sessions_after(self, run: str, after: int, limit: int) -> list[WorkRow]: ...

    async def list_groups_after(self, run: str, after: int, limit: int) -> list[TaskRow]: ...

    async def wait_for_results(self, run: str, after: int, seconds: float, unit: ResultUnit) -> None: ...


class _Piece(NamedTuple):
    """A piece of a page."""

    data: bytes
    cursor: int | None  # of the result that ends with this piece
    is_held_back: bool = False  # a session with a reward whose traces are held back


_Pieces = list[_Piece]


class _HeldBackCount:
    """Counts sessions with a reward whose traces are held back: they are not usable."""

    def __init__(self) -> None:
        self.sessions = 0


class _ResultInputs(msgspec.Struct):
    """Everything that a result is rendered from."""

    row: WorkRow
    ended: SessionOutcome
    form: ResultForm
    recorded: SessionRecord


_decode_outcome = msgspec.json.Decoder(SessionOutcome).decode
_encode = msgspec.json.Encoder().encode


class ResultPages:
    def __init__(self, rows: ResultSource, store: Store, checker: SessionChecker | None = None) -> None:
        """Without a `checker`, every session is checked, without metrics."""
        self.checker = checker or SessionChecker()
        self._rows = rows
        self._store = store
        self._forms: LRUCache[tuple[str, str], ResultForm] = LRUCache(_MAX_FORMS)

    async def stream_page(
        self,
        run: str,
        after: int,
        *,
        wait: float,
        limit: int,
        unit: ResultUnit,
        builder: str | None,
        suspicious: SuspiciousFilter = "keep",
    ) -> AsyncIterator[bytes]:
        """`{"results": [...], "cursor": ...}`: results behind the cursor `after`, in order. Waits up to `wait` seconds
        if there are none. `suspicious` filters sessions, also within groups."""
        rows, last = await self._wait_for_ended(run, after, wait, limit, unit, suspicious)
        opening = b'{"results":['
        cursor, size, truncated = after, 0, False
        async with contextlib.aclosing(self._render_rows(rows, builder, suspicious)) as batches:
            async for pieces in batches:
                chunks = []
                for piece, end_cursor, _ in pieces:
                    chunks += [opening, piece]
                    size += len(piece)
                    opening = b"" if end_cursor is None else b","
                    cursor = cursor if end_cursor is None else end_cursor
                    if size >= MAX_PAGE_BYTES and end_cursor is not None:
                        break
                yield b"".join(chunks)
                if size >= MAX_PAGE_BYTES and opening:
                    truncated = True
                    break
        yield (b"" if size else opening) + b'],"cursor":%d}' % (cursor if truncated else last)

    async def stream_status(
        self, task: TaskRow, *, results: bool, cancelled_sessions: int | None = None
    ) -> AsyncIterator[bytes]:
        """A task's status (records.result.TaskStatus), with its results so far if `results` is set."""
        document: dict[str, object] = {
            "task_id": task.task_id,
            "run": task.run,
            "status": get_task_status(task),
            "total_sessions": task.samples,
            "completed_sessions": task.ended,
            "cancelled": task.cancelled,
            "created_at": task.created_at,
            "ended_at": task.ended_at,
            "cursor": task.cursor,
            "result_paths": [],
            **({} if cancelled_sessions is None else {"cancelled_sessions": cancelled_sessions}),
        }
        rows = await self._rows.list_task_work(task.run, task.task_id)
        document["sessions"] = [
            {"sample": row.sample, "state": row.state, "attempt": row.attempt, "node": row.node, "id": row.session_id}
            for row in rows[:_MAX_LISTED_SESSIONS]
        ]
        yield _encode(document)[:-1] + b',"results":['
        held_back = _HeldBackCount()
        if results:
            async for piece in self._render_ended(rows, None, held_back):
                yield piece
        yield b'],"usable_sessions":%d}' % (task.usable - held_back.sessions)

    async def render_tree(self, task: TaskRow) -> bytes:
        """The token tree over all sessions of a task that have ended so far."""
        rows = [row for row in await self._rows.list_task_work(task.run, task.task_id) if row.summary is not None]
        remaining, tree = iter(rows), GroupTree(self.checker)
        async for batch in self._store.read_sessions([row.session_id for row in rows]):
            for record, row in zip(batch, remaining, strict=False):
                if record.session is not None and row.summary is not None and _find_problem(row, record) is None:
                    ended_session = apply_outcome(record.session, _decode_outcome(row.summary))
                    await asyncio.to_thread(tree.add, ended_session, record.exchanges)
        return await asyncio.to_thread(lambda: _encode(wire.tree_to_dict(tree.build())))

    async def _wait_for_ended(
        self, run: str, after: int, wait: float, limit: int, unit: ResultUnit, suspicious: SuspiciousFilter
    ) -> tuple[Sequence[WorkRow | TaskRow], int]:
        """Rows that match the filter, and the cursor of the last row read."""
        now = asyncio.get_running_loop().time
        deadline = now() + wait
        while True:
            rows = await (
                self._rows.list_sessions_after(run, after, limit)
                if unit == "session"
                else self._rows.list_groups_after(run, after, limit)
            )
            if rows:
                after = rows[-1].cursor or after
                if matching := [row for row in rows if _matches_filter(row, suspicious)]:
                    return matching, after
                continue
            remaining = deadline - now()
            if remaining <= 0 or self._rows.closing:
                return rows, after
            await self._rows.wait_for_results(run, after, remaining, unit)

    async def _render_rows(
        self, rows: Sequence[WorkRow | TaskRow], builder: str | None, suspicious: SuspiciousFilter
    ) -> AsyncGenerator[_Pieces, None]:
        async for results in self._render_sessions([row for row in rows if isinstance(row, WorkRow)], builder):
            yield results
        for task in rows:
            if isinstance(task, TaskRow):
                held_back = _HeldBackCount()
                async for piece in self._render_group(task, builder, suspicious, held_back):
                    yield [_Piece(piece, None)]
                yield [_Piece(b'],"usable":%d}' % (task.usable - held_back.sessions), task.cursor)]

    async def _render_group(
        self, task: TaskRow, builder: str | None, suspicious: SuspiciousFilter, held_back: "_HeldBackCount"
    ) -> AsyncIterator[bytes]:
        """A group without its closing bracket."""
        rows = await self._rows.list_task_work(task.run, task.task_id)
        document = {
            "task_id": task.task_id,
            "run": task.run,
            "status": get_task_status(task),
            "asked": task.samples,
            "cancelled": sum(_was_cancelled(row, task) for row in rows),
            "cursor": task.cursor,
        }
        yield _encode(document)[:-1] + b',"results":['
        async for piece in self._render_ended(
            [row for row in rows if _matches_filter(row, suspicious)], builder, held_back
        ):
            yield piece

    async def _render_ended(
        self, rows: list[WorkRow], builder: str | None, held_back: "_HeldBackCount"
    ) -> AsyncIterator[bytes]:
        """The results of ended sessions, separated by commas."""
        separator = b""
        async for results in self._render_sessions([row for row in rows if row.summary is not None], builder):
            held_back.sessions += sum(result.is_held_back for result in results)
            yield separator + b",".join(result.data for result in results)
            separator = b","

    async def _render_sessions(self, rows: list[WorkRow], builder: str | None) -> AsyncIterator[_Pieces]:
        """Renders a records.result.SessionResult for each row, in the batches that the store reads: switching threads
        takes longer than rendering a short session."""
        remaining = iter(rows)
        async for batch in self._store.read_sessions([row.session_id for row in rows]):
            inputs = [
                await self._gather_inputs(row, record, builder) for record, row in zip(batch, remaining, strict=False)
            ]
            yield await asyncio.to_thread(_build_all, inputs, self.checker)

    async def _gather_inputs(self, row: WorkRow, recorded: SessionRecord, builder: str | None) -> _ResultInputs:
        assert row.summary is not None
        outcome = _decode_outcome(row.summary)
        stored_form = None if outcome.builder is None else ResultForm(outcome.builder, outcome.mask_traces)
        form = stored_form or await self._get_result_form(row)
        return _ResultInputs(row, outcome, form if builder is None else ResultForm(builder, form.mask_traces), recorded)

    async def _get_result_form(self, row: WorkRow) -> ResultForm:
        """The result form of a row's task."""
        key = row.run, row.task_id
        form = self._forms.get(key)
        if form is None:
            task = await self._rows.get_task(*key)
            form = self._forms[key] = ResultForm() if task is None else parse_result_form(task.request)
        return form


def _matches_filter(row: WorkRow | TaskRow, suspicious: SuspiciousFilter) -> bool:
    if suspicious == "keep" or isinstance(row, TaskRow) or row.summary is None:
        return True
    return is_suspicious(_decode_outcome(row.summary).evidence) == (suspicious == "only")


def _build_all(inputs: list[_ResultInputs], checker: SessionChecker) -> _Pieces:
    return [_build_result(item, checker) for item in inputs]


def _build_result(inputs: _ResultInputs, checker: SessionChecker) -> _Piece:
    row, outcome, form = inputs.row, inputs.ended, inputs.form
    session, exchanges = inputs.recorded.session, inputs.recorded.exchanges
    problem = _find_problem(row, inputs.recorded)
    is_held = False
    if problem is not None:
        log.error("Session %s can't be rendered: %s", row.session_id, problem)
        result = render_failed_result(row.task_id, row.sample, outcome, "session_unreadable", problem)
    else:
        try:
            result = render_ended_result(row.task_id, row.sample, outcome, form, session, exchanges, checker)
        except HeldBackError as held_back:
            is_held = outcome.reason is None
            result = render_failed_result(row.task_id, row.sample, outcome, held_back.reason, str(held_back), session)
        except Exception as error:  # a plug-in's failure at one session must not hide the others
            log.exception("The builder %s failed at session %s", form.builder, row.session_id)
            why = f"The builder {form.builder} failed: {error!r}"
            result = render_failed_result(row.task_id, row.sample, outcome, "build_failed", why)
    result["metadata"]["run"] = row.run
    return _Piece(_encode({"cursor": row.cursor, "sample": row.sample, **result}), row.cursor, is_held)


def _find_problem(row: WorkRow, recorded: SessionRecord) -> str | None:
    """Why the session can't be rendered; None if it can. A node's outcome is trusted, except for the session of another
    task."""
    session = recorded.session
    if recorded.damage is not None:
        return recorded.damage
    if session is None:
        return None if row.session_id is None else "the store does not have the session"
    owner = session.run, session.metadata.get("task_id")
    return None if owner == (row.run, row.task_id) else "the session is another task's"


def _was_cancelled(row: WorkRow, task: TaskRow) -> bool:
    reason = None if row.summary is None else _decode_outcome(row.summary).reason
    return reason is not None and reason in ("cancelled", task.cancelled)

"""Tasks: submitted, looked at, cancelled; and the feed of results, in the order in which they end."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Path, Query
from fastapi.responses import Response, StreamingResponse
from msgspec import Struct
from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticSerializationError

from polar.export.polar import build_stage_timing, find_session_status
from polar.plugins import list_names
from polar.records.result import (
    GroupResult,
    NumberedResult,
    ResultUnit,
    SessionStatus,
    SessionTiming,
    SuspiciousFilter,
    TaskState,
    TaskStatus,
)
from polar.records.task import TaskRequest
from polar.rollout.protocol import SessionOutcome
from polar.rollout.queue.records import TaskRow, WorkRow
from polar.rollout.results import get_task_status
from polar.rollout.routes.bodies import INT64_LIMIT, Body, Name, RunName, describe_errors
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.service import RefusedTask, SubmittedTask
from polar.validation_errors import format_validation_errors

TaskId = Annotated[str, Path(description="as it was submitted; slashes may stand in it as they are")]
RunQuery = Annotated[RunName, Query()]
IncludeResults = Annotated[bool, Query(description="false: without its results")]

_TRAJECTORY_SUFFIX = "/trajectory"
_MAX_BATCH_TASKS = 10_000
_MAX_LISTED_TASKS = 10_000


class TaskSubmitted(BaseModel):
    task_id: str
    status: TaskState


class TaskAnswer(BaseModel):
    """`status`, or `error` and `code`, which is the status that the task alone would have been answered with."""

    task_id: str | None = None
    status: TaskState | None = None
    error: str | None = None
    code: int | None = None
    retry_after: float | None = Field(None, description="seconds")


class TaskAnswers(BaseModel):
    tasks: list[TaskAnswer]


class ListedTask(BaseModel):
    task_id: str
    status: TaskState
    harness: str | None
    model: str | None
    num_samples: int
    completed_sessions: int
    errored_sessions: int = Field(description="that have ended without a reward")
    created_at: float = Field(description="seconds since 1970")
    updated_at: float


class ListedTasks(BaseModel):
    tasks: list[ListedTask]


class ListedSession(BaseModel):
    session_id: str | None = Field(description="null until it has ended")
    task_id: str
    status: SessionStatus | Literal["REGISTERED", "RUNNING"]
    node_id: str | None
    reward: float | None = None
    timing: SessionTiming | None = None
    error: str | None = None


class ListedSessions(BaseModel):
    task_id: str
    sessions: list[ListedSession]


class Page(BaseModel):
    results: list[NumberedResult] | list[GroupResult]
    cursor: int


class _InvalidTask:
    """One of many that is no task, and why."""

    def __init__(self, task_id: str | None, error: str) -> None:
        self.task_id = task_id
        self.error = error


def _validate_or_explain(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        task_id = value.get("task_id") if isinstance(value, dict) else None
        return _InvalidTask(task_id if isinstance(task_id, str) else None, format_validation_errors(error))


class ManyTasks(Body):
    tasks: list[Annotated[TaskRequest, WrapValidator(_validate_or_explain)]] = Field(max_length=_MAX_BATCH_TASKS)


def add_routes(router: APIRouter, parts: ServiceParts) -> None:
    rollout, pages, allowed = parts.rollout, parts.pages, parts.callbacks.allowed_hosts

    @router.post("/rollout/task/submit", tags=["tasks"], responses=describe_errors(400, 409, 413, 429))
    async def submit(task: TaskRequest, run: RunQuery = "default") -> TaskSubmitted:
        """Takes a task in, durably. The same task again is answered as it is by now; another one of that name is not
        taken."""
        task = _assign_run(task, run)
        answer = _refused(task) or (await rollout.submit([task]))[0]
        if isinstance(answer, RefusedTask):
            after = {} if answer.retry_after is None else {"Retry-After": str(math.ceil(answer.retry_after))}
            raise HTTPException(answer.code, answer.error, after)
        return TaskSubmitted(task_id=answer.task_id, status=answer.status)

    @router.post(
        "/rollout/tasks",
        tags=["tasks"],
        response_model_exclude_none=True,
        responses=describe_errors(400, 413),
    )
    async def submit_many(body: ManyTasks, run: RunQuery = "default") -> TaskAnswers:
        """Takes each task in by itself; the answers are in the tasks' order."""
        answers: list[TaskAnswer | None] = []
        accepted: list[TaskRequest] = []

        def check_tasks() -> None:
            for task in body.tasks:
                if isinstance(task, _InvalidTask):
                    answers.append(TaskAnswer(task_id=task.task_id, error=task.error, code=422))
                    continue
                task = _assign_run(task, run)
                refused = _refused(task)
                answers.append(None if refused is None else _to_answer(refused))
                if refused is None:
                    accepted.append(task)

        await asyncio.to_thread(check_tasks)  # thousands take a while
        submitted = iter(await rollout.submit(accepted)) if accepted else iter(())
        return TaskAnswers(tasks=[answer or _to_answer(next(submitted)) for answer in answers])

    def _refused(task: TaskRequest) -> RefusedTask | None:
        problem = None if task.callback_url is None else allowed.find_problem(task.callback_url)
        problem = problem or find_storage_problem(task)
        return None if problem is None else RefusedTask(task.task_id, 422, problem)

    @router.get("/rollout/task/{task_id:path}" + _TRAJECTORY_SUFFIX, tags=["tasks"], responses=describe_errors(404))
    async def trajectory(task_id: TaskId, run: RunQuery = "default") -> Response:
        """The token tree over all sessions of the task that have ended by now."""
        return Response(await pages.render_tree(await _find_task(run, task_id)), media_type="application/json")

    @router.get(
        "/rollout/task/{task_id:path}",
        tags=["tasks"],
        responses=describe_errors(404) | {200: {"model": TaskStatus, "description": "The task as it is"}},
    )
    async def one_task(
        task_id: TaskId,
        run: RunQuery = "default",
        results: IncludeResults = True,
    ) -> Response:
        """How far a task is, with the results of its sessions that have ended."""
        status = pages.stream_status(await _find_task(run, task_id), results=results)
        return await stream_response(status)

    @router.delete(
        "/rollout/task/{task_id:path}",
        tags=["tasks"],
        responses=describe_errors(404) | {200: {"model": TaskStatus, "description": "The task as it is"}},
    )
    async def cancel(task_id: TaskId, run: RunQuery = "default", results: IncludeResults = True) -> Response:
        """What has not begun never will; what runs is ended, and has the reason `cancelled`."""
        await _find_task(run, task_id)
        cancelled = await rollout.cancel(run, task_id)
        task = await _find_task(run, task_id)
        return await stream_response(pages.stream_status(task, results=results, cancelled_sessions=cancelled or 0))

    @router.get("/tasks", tags=["tasks"], responses=describe_errors())
    async def tasks(
        run: RunQuery = "default",
        status: TaskState | None = None,
        harness: str | None = None,
        since: Annotated[float | None, Query(description="of the last change: seconds since 1970")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> ListedTasks:
        """The newest tasks, without their results; of those that fit, among the 10,000 newest."""
        filtered = any(value is not None for value in (status, harness, since))
        rows = await rollout.list_recent_tasks(run, _MAX_LISTED_TASKS if filtered else limit)
        listed_tasks = [
            task
            for task in map(_to_listed_task, rows)
            if status in (None, task.status) and harness in (None, task.harness) and task.updated_at >= (since or 0.0)
        ]
        return ListedTasks(tasks=listed_tasks[:limit])

    @router.get("/tasks/{task_id:path}/sessions", tags=["tasks"], responses=describe_errors(404))
    async def sessions_of_task(task_id: TaskId, run: RunQuery = "default") -> ListedSessions:
        """Where each session of a task is, without its trajectory."""
        await _find_task(run, task_id)
        rows = await rollout.list_task_work(run, task_id)
        return ListedSessions(task_id=task_id, sessions=[_to_listed_session(row) for row in rows])

    _add_feed_route(router, parts)

    async def _find_task(run: str, task_id: str) -> TaskRow:
        task = await rollout.get_task(run, task_id) if task_id.isprintable() else None
        if task is None:
            raise HTTPException(404, f"There is no task {task_id} in the run {run}.")
        return task


def _add_feed_route(router: APIRouter, parts: ServiceParts) -> None:
    @router.get(
        "/rollout/results",
        tags=["results"],
        responses=describe_errors()
        | {200: {"model": Page, "description": "A page of them, and where the next one begins"}},
    )
    async def results(
        run: Annotated[RunName, Query()] = "default",
        after: Annotated[int | None, Query(ge=0, lt=INT64_LIMIT, description="the cursor of the page before")] = None,
        wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait where there is nothing yet")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="at most so many; large ones may be fewer")] = 100,
        unit: Annotated[ResultUnit, Query(description="sessions, or tasks with all of their sessions")] = "session",
        builder: Annotated[str | None, Query(description="of the traces [default: the task's own]")] = None,
        suspicious: Annotated[
            SuspiciousFilter, Query(description="sessions with proven tampering: among the others, alone, or left out")
        ] = "keep",
        consumer: Annotated[
            Name | None,
            Query(
                description="a name under which the server remembers the cursor: `after` says that all up to it is "
                "taken; without `after`, the page goes on from there"
            ),
        ] = None,
    ) -> Response:
        """Sessions (or tasks) that have ended, in that order, with their trajectories. The cursor outlives restarts."""
        if builder is not None and builder not in list_names("builders"):
            raise HTTPException(422, f"There is no builder {builder}; known: {', '.join(list_names('builders'))}.")
        if consumer is not None:
            after = await parts.rollout.update_consumer(run, consumer, after, unit)
        pages = parts.pages.stream_page(
            run, after or 0, wait=wait, limit=limit, unit=unit, builder=builder, suspicious=suspicious
        )
        return await stream_response(pages)


class _Agent(Struct):
    harness: str = "shell"
    model_name: str | None = None


class _Request(Struct):
    """Of a TaskRequest, what is listed."""

    agent: _Agent = msgspec.field(default_factory=_Agent)


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_outcome = msgspec.json.Decoder(SessionOutcome).decode


def _to_listed_task(row: TaskRow) -> ListedTask:
    agent = _decode_request(row.request).agent
    return ListedTask(
        task_id=row.task_id,
        status=get_task_status(row),
        harness=agent.harness,
        model=agent.model_name,
        num_samples=row.samples,
        completed_sessions=row.ended,
        errored_sessions=row.ended - row.usable,
        created_at=row.created_at,
        updated_at=row.ended_at or row.created_at,
    )


def _to_listed_session(row: WorkRow) -> ListedSession:
    if row.summary is None:
        status: Literal["REGISTERED", "RUNNING"] = "RUNNING" if row.state == "leased" else "REGISTERED"
        return ListedSession(session_id=row.session_id, task_id=row.task_id, status=status, node_id=row.node)
    outcome = _decode_outcome(row.summary)
    return ListedSession(
        session_id=row.session_id,
        task_id=row.task_id,
        status=find_session_status(outcome.reason),
        node_id=outcome.node_id,
        reward=outcome.reward,
        timing=SessionTiming(**build_stage_timing(outcome.seconds)),
        error=outcome.error or outcome.reason,
    )


async def stream_response(pieces: AsyncIterator[bytes]) -> Response:
    """As it is written; but what fails at its beginning is still told as a failure."""
    first = await anext(pieces)

    async def chain_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(chain_pieces(), media_type="application/json")


def find_storage_problem(task: TaskRequest) -> str | None:
    """Why a task can't be written down, and be read again as what it is."""
    if not (task.task_id.isprintable() and task.run.isprintable()):
        return "task_id and run take characters that can be printed"
    if task.task_id.endswith(_TRAJECTORY_SUFFIX):
        return f"task_id must not end with {_TRAJECTORY_SUFFIX}: it could not be asked for"
    if not {".", ".."}.isdisjoint(task.task_id.split("/")):
        return "task_id must not have . or .. as a part: clients shorten such paths"
    try:
        TaskRequest.model_validate_json(task.model_dump_json(exclude_unset=True))
    except PydanticSerializationError:
        return "something in it is nested too deeply, or is no text"
    except ValidationError as error:
        return format_validation_errors(error)
    return None


def _assign_run(task: TaskRequest, run: str) -> TaskRequest:
    """The run that it names, else that of the call."""
    named = "run" in task.model_fields_set or run == task.run
    return task if named else task.model_copy(update={"run": run})


def _to_answer(result: SubmittedTask | RefusedTask) -> TaskAnswer:
    if isinstance(result, RefusedTask):
        return TaskAnswer(task_id=result.task_id, error=result.error, code=result.code, retry_after=result.retry_after)
    return TaskAnswer(task_id=result.task_id, status=result.status)

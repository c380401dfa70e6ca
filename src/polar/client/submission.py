"""Tasks as programs give them (files and folders, tables, requests), and their way to a control plane.

They are sent in batches, again where an answer was lost, and slowly while the queue is full.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import ValidationError

from polar import validation_errors
from polar.client.calls import BUSY, Calls, ClientError, retry_delays
from polar.errors import ConfigError
from polar.records.task import TaskRequest

_MAX_BATCH_TASKS, _MAX_BATCH_BYTES = 200, 4 * 2**20
_MAX_NAMED_TASKS = 5
"""Refused tasks that an error names."""

TaskLike = str | os.PathLike[str] | dict[str, Any] | TaskRequest
"""A file or folder of tasks, the fields of one, or one."""


def load_tasks(
    tasks: TaskLike | Iterable[TaskLike], *, run: str | None = None, backend: str | None = None
) -> list[TaskRequest]:
    """Reads all of them, in their order: as tasks of `run`, where it is given. Files are read for `backend`, since
    Harbor's tasks differ between them. Raises ConfigError."""
    if isinstance(tasks, str | os.PathLike | dict | TaskRequest):
        tasks = [tasks]
    found: dict[str, TaskRequest] = {}
    for like in tasks:
        for task in _read(like, backend):
            if task.task_id in found:
                raise ConfigError(f"There are two tasks {task.task_id!r}: every task needs a name of its own.")
            found[task.task_id] = task if run is None else _assign_run(task, run)
    return list(found.values())


def _assign_run(task: TaskRequest, run: str) -> TaskRequest:
    if "run" in task.model_fields_set and task.run != run:
        raise ConfigError(f"Task {task.task_id!r} is one of the run {task.run!r}, and goes to {run!r}: name its run.")
    return task.model_copy(update={"run": run})


def _read(like: TaskLike, backend: str | None) -> list[TaskRequest]:
    if isinstance(like, TaskRequest):
        return [like]
    if not isinstance(like, dict):
        from polar.tasks import read  # much more than a client needs else

        return read([Path(like)], backend=backend)
    try:
        return [TaskRequest.model_validate(like)]
    except ValidationError as error:
        raise ConfigError(
            f"Task {like.get('task_id', 'without a task_id')}: {validation_errors.format_validation_errors(error)}."
        ) from error


class SubmitAnswer(Struct, frozen=True, omit_defaults=True):
    """What became of a task: `status`, or `error` and its `code` where it was refused."""

    task_id: str
    status: str | None = None
    error: str | None = None
    code: int | None = None
    retry_after: float | None = None


class TasksRefused(ClientError):
    """Some tasks were not taken; `answers` has what became of each."""

    def __init__(self, message: str, answers: list[SubmitAnswer], status: int | None) -> None:
        super().__init__(message, status)
        self.answers = answers


class _Answers(Struct):
    tasks: list[SubmitAnswer]


_decode_answers = msgspec.json.Decoder(_Answers).decode


async def submit(
    calls: Calls, tasks: list[TaskRequest], timeout: float | None, on_answer: Callable[[SubmitAnswer], object]
) -> list[SubmitAnswer]:
    """The server's answers, in the tasks' order. While it has no room, this waits, `timeout` seconds at most; what is
    without a place then is answered so. A task that the server has already is answered as it was. `on_answer`
    is called with each answer as it comes, and so more than once for a task without room."""
    wanted = deque((task.task_id, task.model_dump_json(exclude_unset=True).encode()) for task in tasks)
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[str, SubmitAnswer] = {}
    max_tasks, pauses = _MAX_BATCH_TASKS, retry_delays()
    while wanted:
        batch = _batch(wanted, max_tasks)
        got = await _send(calls, batch, deadline)
        answers |= got
        for task_id, _ in batch:
            on_answer(got[task_id])
        busy = [task for task in batch if got[task[0]].code == BUSY]
        if not busy:
            max_tasks, pauses = min(2 * max_tasks, _MAX_BATCH_TASKS), retry_delays()
            continue
        max_tasks = max(len(batch) - len(busy), 1)  # as many as there was room for
        wanted.extendleft(reversed(busy))
        pause = max(next(pauses), *(got[task_id].retry_after or 0.0 for task_id, _ in busy))
        if deadline is not None:
            if time.monotonic() >= deadline:
                break
            pause = min(pause, max(deadline - time.monotonic(), 0.0))
        await asyncio.sleep(pause)
    return [answers.get(task.task_id) or _busy_answer(task.task_id) for task in tasks]


def raise_refused(answers: list[SubmitAnswer]) -> None:
    """Raises TasksRefused for those that were."""
    refused = [answer for answer in answers if answer.error is not None]
    if not refused:
        return
    said = "; ".join(f"{answer.task_id}: {answer.error}" for answer in refused[:_MAX_NAMED_TASKS])
    more = f"; and {len(refused) - _MAX_NAMED_TASKS} more" if len(refused) > _MAX_NAMED_TASKS else ""
    of = f"{len(refused)} of {len(answers)} tasks were" if len(answers) > 1 else "The task was"
    raise TasksRefused(f"{of} refused: {said}{more}", answers, refused[0].code)


def _batch(wanted: deque[tuple[str, bytes]], max_tasks: int) -> list[tuple[str, bytes]]:
    batch = [wanted.popleft()]
    size = len(batch[0][1])
    while wanted and len(batch) < max_tasks and size + len(wanted[0][1]) <= _MAX_BATCH_BYTES:
        batch.append(wanted.popleft())
        size += len(batch[-1][1])
    return batch


async def _send(calls: Calls, batch: list[tuple[str, bytes]], deadline: float | None) -> dict[str, SubmitAnswer]:
    body = b'{"tasks":[' + b",".join(task for _, task in batch) + b"]}"
    patience = calls.patience if deadline is None else min(calls.patience, max(deadline - time.monotonic(), 0.0))
    try:
        told = await calls.call("POST", "/rollout/tasks", body=body, decode=_decode_answers, patience=patience)
    except ClientError as error:
        if error.status != BUSY:
            raise
        return {task_id: _busy_answer(task_id, str(error), error.retry_after) for task_id, _ in batch}
    got = {answer.task_id: answer for answer in told.tasks}
    if missing := [task_id for task_id, _ in batch if task_id not in got]:
        raise ClientError(f"{calls.url} did not say what became of the task {missing[0]!r}.")
    return got


def _busy_answer(
    task_id: str, error: str = "there was no room for it in time", again: float | None = None
) -> SubmitAnswer:
    return SubmitAnswer(task_id, error=error, code=BUSY, retry_after=again)

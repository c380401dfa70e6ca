"""Submits tasks, given as files, folders, dictionaries or requests, to a control plane.

Tasks are sent in batches, repeated where an answer was lost, and slowly while the queue is full.
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
from polar.client.calls import BUSY, Calls, ClientError, iterate_retry_delays
from polar.errors import ConfigError
from polar.records.task import TaskRequest

_MAX_BATCH_TASKS, _MAX_BATCH_BYTES = 200, 4 * 2**20
_MAX_NAMED_TASKS = 5
"""Refused tasks that an error names."""

TaskLike = str | os.PathLike[str] | dict[str, Any] | TaskRequest
"""A file or folder of tasks, the fields of a task, or a request."""


def load_tasks(
    tasks: TaskLike | Iterable[TaskLike], *, run: str | None = None, backend: str | None = None
) -> list[TaskRequest]:
    """Reads tasks in order, and assigns them to `run` if given. `backend` overrides the runtime of files, since
    Harbor's tasks depend on it. Raises ConfigError."""
    if isinstance(tasks, str | os.PathLike | dict | TaskRequest):
        tasks = [tasks]
    tasks_by_id: dict[str, TaskRequest] = {}
    for item in tasks:
        for task in _read_tasks(item, backend):
            if task.task_id in tasks_by_id:
                raise ConfigError(f"There are two tasks {task.task_id!r}: every task needs its own task_id.")
            tasks_by_id[task.task_id] = task if run is None else _assign_run(task, run)
    return list(tasks_by_id.values())


def _assign_run(task: TaskRequest, run: str) -> TaskRequest:
    if "run" in task.model_fields_set and task.run != run:
        raise ConfigError(
            f"Task {task.task_id!r} belongs to the run {task.run!r}, but is submitted to {run!r}: use its run."
        )
    return task.model_copy(update={"run": run})


def _read_tasks(item: TaskLike, backend: str | None) -> list[TaskRequest]:
    if isinstance(item, TaskRequest):
        return [item]
    if not isinstance(item, dict):
        from polar.tasks import read  # much more than a client needs else

        return read([Path(item)], backend=backend)
    try:
        return [TaskRequest.model_validate(item)]
    except ValidationError as error:
        raise ConfigError(
            f"Task {item.get('task_id', 'without a task_id')}: {validation_errors.format_validation_errors(error)}."
        ) from error


class SubmitAnswer(Struct, frozen=True, omit_defaults=True):
    """The answer for a task: its `status`, or `error` and `code` where it was refused."""

    task_id: str
    status: str | None = None
    error: str | None = None
    code: int | None = None
    retry_after: float | None = None


class TasksRefused(ClientError):
    """Some tasks were refused; `answers` has the answer for each task."""

    def __init__(self, message: str, answers: list[SubmitAnswer], status: int | None) -> None:
        super().__init__(message, status)
        self.answers = answers


class _Answers(Struct):
    tasks: list[SubmitAnswer]


_decode_answers = msgspec.json.Decoder(_Answers).decode


async def submit(
    calls: Calls, tasks: list[TaskRequest], timeout: float | None, on_answer: Callable[[SubmitAnswer], object]
) -> list[SubmitAnswer]:
    """Submits tasks and returns the answers in the tasks' order. While the queue is full, waits for at most `timeout`
    seconds; tasks that are still not queued then are answered with BUSY. A task that the server already has is answered
    with its status. `on_answer` is called for each answer, and so repeatedly for a task that has to wait."""
    queue = deque((task.task_id, task.model_dump_json(exclude_unset=True).encode()) for task in tasks)
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[str, SubmitAnswer] = {}
    max_tasks, pauses = _MAX_BATCH_TASKS, iterate_retry_delays()
    while queue:
        batch = _take_batch(queue, max_tasks)
        batch_answers = await _send_batch(calls, batch, deadline)
        answers |= batch_answers
        for task_id, _ in batch:
            on_answer(batch_answers[task_id])
        busy = [task for task in batch if batch_answers[task[0]].code == BUSY]
        if not busy:
            max_tasks, pauses = min(2 * max_tasks, _MAX_BATCH_TASKS), iterate_retry_delays()
            continue
        max_tasks = max(len(batch) - len(busy), 1)  # as many as there was room for
        queue.extendleft(reversed(busy))
        pause = max(next(pauses), *(batch_answers[task_id].retry_after or 0.0 for task_id, _ in busy))
        if deadline is not None:
            if time.monotonic() >= deadline:
                break
            pause = min(pause, max(deadline - time.monotonic(), 0.0))
        await asyncio.sleep(pause)
    return [answers.get(task.task_id) or _make_busy_answer(task.task_id) for task in tasks]


def raise_refused(answers: list[SubmitAnswer]) -> None:
    """Raises TasksRefused if any task was refused."""
    refused = [answer for answer in answers if answer.error is not None]
    if not refused:
        return
    explanations = "; ".join(f"{answer.task_id}: {answer.error}" for answer in refused[:_MAX_NAMED_TASKS])
    omitted = f"; and {len(refused) - _MAX_NAMED_TASKS} more" if len(refused) > _MAX_NAMED_TASKS else ""
    subject = f"{len(refused)} of {len(answers)} tasks were" if len(answers) > 1 else "The task was"
    raise TasksRefused(f"{subject} refused: {explanations}{omitted}", answers, refused[0].code)


def _take_batch(queue: deque[tuple[str, bytes]], max_tasks: int) -> list[tuple[str, bytes]]:
    batch = [queue.popleft()]
    size = len(batch[0][1])
    while queue and len(batch) < max_tasks and size + len(queue[0][1]) <= _MAX_BATCH_BYTES:
        batch.append(queue.popleft())
        size += len(batch[-1][1])
    return batch


async def _send_batch(calls: Calls, batch: list[tuple[str, bytes]], deadline: float | None) -> dict[str, SubmitAnswer]:
    body = b'{"tasks":[' + b",".join(task for _, task in batch) + b"]}"
    patience = calls.patience if deadline is None else min(calls.patience, max(deadline - time.monotonic(), 0.0))
    try:
        response = await calls.call("POST", "/rollout/tasks", body=body, decode=_decode_answers, patience=patience)
    except ClientError as error:
        if error.status != BUSY:
            raise
        return {task_id: _make_busy_answer(task_id, str(error), error.retry_after) for task_id, _ in batch}
    answers = {answer.task_id: answer for answer in response.tasks}
    if missing := [task_id for task_id, _ in batch if task_id not in answers]:
        raise ClientError(f"{calls.url} did not say what became of the task {missing[0]!r}.")
    return answers


def _make_busy_answer(
    task_id: str, error: str = "there was no room for it in time", retry_after: float | None = None
) -> SubmitAnswer:
    return SubmitAnswer(task_id, error=error, code=BUSY, retry_after=retry_after)

"""Tasks as programs give them: files and folders, tables, or requests as they are."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar import validation_errors
from polar.errors import ConfigError
from polar.records.task import TaskRequest

TaskLike = str | os.PathLike[str] | dict[str, Any] | TaskRequest
"""A file or folder of tasks, the fields of one, or one."""


def load_tasks(
    tasks: TaskLike | Iterable[TaskLike], *, run: str | None = None, backend: str | None = None
) -> list[TaskRequest]:
    """All of them, in their order: as tasks of `run`, where it is given. Files are read for `backend`, since Harbor's
    tasks are other ones in each. Raises ConfigError."""
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

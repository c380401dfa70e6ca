"""Reads tasks from files and folders, and validates them as far as possible before anything runs.

An invalid task fails here, with its file and field, not after an hour in the middle of a run.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar import validation_errors
from polar.errors import ConfigError
from polar.evaluators import load_evaluator
from polar.harnesses import to_preset_name
from polar.plugins import PluginKind, list_names, load
from polar.records.task import Step, TaskRequest, UploadDir, UploadFile
from polar.tasks import harbor
from polar.tasks.task_files import TASK_FILE_SUFFIXES, TaskTable, read_task_file, read_text

_BUILD_PREFIX = "build:"
_SOURCE_FIELDS = ("source", "src", "local_path", "path")
_PATH_CHECKS = {"upload_file": os.path.isfile, "upload_dir": os.path.isdir}


def read(paths: Iterable[Path], *, backend: str | None = None) -> list[TaskRequest]:
    """Reads the tasks of files and folders, in order. `backend` overrides the runtime of all of them. Raises
    ConfigError."""
    return [task for _, task in read_sources(paths, backend=backend)]


def read_sources(paths: Iterable[Path], *, backend: str | None = None) -> list[tuple[str, TaskRequest]]:
    """Reads tasks, each with its source: the one that its metadata names, else the file if it contains several tasks,
    else the folder."""
    tasks: dict[str, tuple[str, TaskRequest]] = {}
    places: dict[str, str] = {}
    for path in paths:
        for place, source, task in _read_path(Path(path), backend):
            if task.task_id in tasks:
                raise ConfigError(
                    f"{place}: task_id: {task.task_id!r} is already the task of {places[task.task_id]}: "
                    "every task needs its own task_id."
                )
            tasks[task.task_id] = str(task.metadata.get("source", source)), task
            places[task.task_id] = place
    return list(tasks.values())


def _read_path(path: Path, backend: str | None) -> Iterator[tuple[str, str, TaskRequest]]:
    """Yields each task's location, source and content."""
    if harbor.is_task_folder(path):
        yield str(path), path.absolute().parent.name, _read_harbor(path, backend)
    elif path.is_dir():
        entries = [entry for entry in sorted(path.iterdir()) if _is_task(entry)]
        if not entries:
            raise ConfigError(
                f"{path}: there are no tasks in this folder: it holds neither task files "
                f"({', '.join(TASK_FILE_SUFFIXES)}) "
                "nor Harbor's task folders."
            )
        for entry in entries:
            yield from _read_path(entry, backend)
    elif path.name == harbor.TASK_FILE and harbor.is_task_folder(path.parent):
        yield from _read_path(path.parent, backend)
    elif not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder.")
    elif path.suffix not in TASK_FILE_SUFFIXES:
        raise ConfigError(f"{path}: a task file ends in {', '.join(TASK_FILE_SUFFIXES)}.")
    else:
        tasks = read_task_file(path)
        alone = len(tasks) == 1 and path.suffix != ".jsonl"
        for task in tasks:
            yield task.location, path.absolute().parent.name if alone else path.name, _to_task(task, backend)


def _is_task(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    return harbor.is_task_folder(path) if path.is_dir() else path.suffix in TASK_FILE_SUFFIXES


def _to_task(table: TaskTable, backend: str | None) -> TaskRequest:
    fields: dict[str, Any] = {"task_id": table.name} | table.table
    if "instruction_file" in fields:
        fields["instruction"] = _read_instruction(table)
        del fields["instruction_file"]
    if backend is not None and isinstance(runtime := fields.get("runtime", {}), dict):
        fields["runtime"] = runtime | {"backend": backend}
    return _validate(fields, table.location, table.folder)


def _read_harbor(folder: Path, backend: str | None) -> TaskRequest:
    return _validate(
        harbor.read_task_fields(folder, backend or harbor.DEFAULT_BACKEND), str(folder / harbor.TASK_FILE), folder
    )


def _read_instruction(table: TaskTable) -> str:
    name = table.table["instruction_file"]
    if "instruction" in table.table:
        raise ConfigError(
            f"{table.location}: instruction_file: there is an `instruction` as well: it takes one of them."
        )
    if not isinstance(name, str) or not os.path.isfile(table.folder / name):
        raise ConfigError(f"{table.location}: instruction_file: there is no file {name!r} in {table.folder}.")
    return read_text(table.folder / name)


def _validate(fields: dict[str, Any], place: str, folder: Path) -> TaskRequest:
    try:
        task = TaskRequest.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{place}: {validation_errors.format_validation_errors(error)}.") from error
    problems = _resolve_paths(task, folder)
    problems += _find_unknown_name("runtime.backend", "runtimes", task.runtime.backend)
    problems += _find_unknown_name("agent.harness", "harnesses", to_preset_name(task.agent.preset))
    problems += _find_unknown_name("builder.strategy", "builders", task.builder.strategy)
    if task.evaluator is not None:
        problems += _find_unknown_name("evaluator.strategy", "evaluators", task.evaluator.strategy)
    if problems:
        raise ConfigError(f"{place}: {validation_errors.escape_line('; '.join(problems))}.")
    if task.evaluator is not None:
        try:
            load_evaluator(task.evaluator)
        except ConfigError as error:
            raise ConfigError(f"{place}: {validation_errors.escape_line(_shorten_message(error))}") from error
    return task


def _shorten_message(error: ConfigError) -> str:
    """Prefixes the field that an evaluator names with the task's field."""
    inner = str(error.__cause__)
    return f"evaluator.{inner}" if inner.startswith("config") else str(error)


def _find_unknown_name(field: str, kind: PluginKind, name: str) -> list[str]:
    known = list_names(kind)
    return [] if name in known else [f"{field}: there is no {name!r}; known: {', '.join(known)}"]


# Paths on this machine are relative to the task's file, and must exist.


def _resolve_paths(task: TaskRequest, folder: Path) -> list[str]:
    """Makes every path of the task absolute. Returns the problems."""
    problems = []
    for name, steps in (("prepare", task.runtime.prepare), ("eval_prepare", task.runtime.eval_prepare or [])):
        for number, step in enumerate(steps):
            problems += _resolve_step(step, f"runtime.{name}[{number}]", folder)
    task.runtime.image, problem = _resolve_image(task.runtime.image, folder)
    problems += problem
    if task.agent.skills_path is not None:
        task.agent.skills_path = _to_absolute(task.agent.skills_path, folder)
        problems += _find_missing(task.agent.skills_path, "upload_dir", "agent.skills_path")
    if task.evaluator is not None:
        task.evaluator.config = _resolve_config(task.evaluator.config, task.evaluator.strategy, folder)
        problems += _find_config_problems(task.evaluator.config, "evaluator.config")
    return problems


def _to_absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / path)


def _resolve_step(step: Step, place: str, folder: Path) -> list[str]:
    if isinstance(step, UploadFile | UploadDir) and step.source is not None:
        step.source = _to_absolute(step.source, folder)
        return _find_missing(step.source, step.type, f"{place}.source")
    return []


def _find_missing(path: str, kind: str, field: str) -> list[str]:
    if _PATH_CHECKS[kind](path):
        return []
    return [f"{field}: there is no {'file' if kind == 'upload_file' else 'folder'} {path!r}"]


def _resolve_image(image: str | None, folder: Path) -> tuple[str | None, list[str]]:
    """Makes an image's folder absolute (`./`, `../` or `build:`); any other name is a registry's."""
    if image is None:
        return None, []
    build, path = (_BUILD_PREFIX, image.removeprefix(_BUILD_PREFIX)) if image.startswith(_BUILD_PREFIX) else ("", image)
    if not build and not path.startswith(("./", "../")):
        return image, []
    path = _to_absolute(path, folder)
    return build + path, _find_missing(path, "upload_dir", "runtime.image")


def _resolve_config(value: Any, strategy: str, folder: Path) -> Any:
    """Makes paths in an evaluator's config absolute, also in its steps and nested evaluators."""
    if isinstance(value, list):
        return [_resolve_config(item, strategy, folder) for item in value]
    if not isinstance(value, dict):
        return value
    inner = _get_text(value, "strategy") or strategy
    resolved = {key: _resolve_config(item, inner, folder) for key, item in value.items()}
    if _get_text(value, "type") in _PATH_CHECKS:
        for key in _SOURCE_FIELDS:
            if isinstance(path := value.get(key), str):
                resolved[key] = _to_absolute(path, folder)
    for key in _list_path_fields(strategy):
        if isinstance(path := value.get(key), str):
            resolved[key] = _to_absolute(path, folder)
    return resolved


def _list_path_fields(strategy: str) -> tuple[str, ...]:
    """The fields of an evaluator's config that are paths on this machine."""
    fields = getattr(load("evaluators", strategy), "paths", ()) if strategy in list_names("evaluators") else ()
    return tuple(fields)


def _get_text(table: dict[str, Any], key: str) -> str:
    return text if isinstance(text := table.get(key), str) else ""


def _find_config_problems(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _find_config_problems(item, f"{place}[{number}]")
    elif isinstance(value, dict):
        if (kind := _get_text(value, "type")) in _PATH_CHECKS:
            for key in _SOURCE_FIELDS:
                if isinstance(path := value.get(key), str):
                    yield from _find_missing(path, kind, f"{place}.{key}")
        for key, item in value.items():
            yield from _find_config_problems(item, f"{place}.{key}")

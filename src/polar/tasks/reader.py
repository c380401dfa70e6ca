"""Tasks from files and folders, checked as far as they can be before anything runs.

A task that is wrong is found here, in a sentence that names its file and field, and not after an hour in the middle of
a run.
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
    """The tasks of files and folders, in their order; `backend` is where all of them run, whatever they say. Raises
    ConfigError."""
    return [task for _, task in read_sources(paths, backend=backend)]


def read_sources(paths: Iterable[Path], *, backend: str | None = None) -> list[tuple[str, TaskRequest]]:
    """The same, each with its source, which data is counted by: the one that its metadata names, else the file that
    holds it and others, else the folder that it stands in."""
    tasks: dict[str, tuple[str, TaskRequest]] = {}
    places: dict[str, str] = {}
    for path in paths:
        for place, source, task in _read(Path(path), backend):
            if task.task_id in tasks:
                raise ConfigError(
                    f"{place}: task_id: {task.task_id!r} is already the task of {places[task.task_id]}: "
                    "every task needs a name of its own."
                )
            tasks[task.task_id] = str(task.metadata.get("source", source)), task
            places[task.task_id] = place
    return list(tasks.values())


def _read(path: Path, backend: str | None) -> Iterator[tuple[str, str, TaskRequest]]:
    """Where each stands, in words; the name of its source; and the task."""
    if harbor.is_task_folder(path):
        yield str(path), path.absolute().parent.name, _read_harbor(path, backend)
    elif path.is_dir():
        found = [one for one in sorted(path.iterdir()) if _is_task(one)]
        if not found:
            raise ConfigError(
                f"{path}: there are no tasks in this folder: it holds neither task files "
                f"({', '.join(TASK_FILE_SUFFIXES)}) "
                "nor Harbor's task folders."
            )
        for one in found:
            yield from _read(one, backend)
    elif path.name == harbor.TASK_FILE and harbor.is_task_folder(path.parent):
        yield from _read(path.parent, backend)
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


def _to_task(one: TaskTable, backend: str | None) -> TaskRequest:
    fields: dict[str, Any] = {"task_id": one.name} | one.table
    if "instruction_file" in fields:
        fields["instruction"] = _read_instruction(one)
        del fields["instruction_file"]
    if backend is not None and isinstance(runtime := fields.get("runtime", {}), dict):
        fields["runtime"] = runtime | {"backend": backend}
    return _validate(fields, one.location, one.folder)


def _read_harbor(folder: Path, backend: str | None) -> TaskRequest:
    return _validate(
        harbor.task_fields(folder, backend or harbor.DEFAULT_BACKEND), str(folder / harbor.TASK_FILE), folder
    )


def _read_instruction(one: TaskTable) -> str:
    name = one.table["instruction_file"]
    if "instruction" in one.table:
        raise ConfigError(f"{one.location}: instruction_file: there is an `instruction` as well: it takes one of them.")
    if not isinstance(name, str) or not os.path.isfile(one.folder / name):
        raise ConfigError(f"{one.location}: instruction_file: there is no file {name!r} in {one.folder}.")
    return read_text(one.folder / name)


def _validate(fields: dict[str, Any], place: str, folder: Path) -> TaskRequest:
    try:
        task = TaskRequest.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{place}: {validation_errors.format_validation_errors(error)}.") from error
    wrong = _resolve_paths(task, folder)
    wrong += _find_unknown_name("runtime.backend", "runtimes", task.runtime.backend)
    wrong += _find_unknown_name("agent.harness", "harnesses", to_preset_name(task.agent.preset))
    wrong += _find_unknown_name("builder.strategy", "builders", task.builder.strategy)
    if task.evaluator is not None:
        wrong += _find_unknown_name("evaluator.strategy", "evaluators", task.evaluator.strategy)
    if wrong:
        raise ConfigError(f"{place}: {validation_errors.escape_line('; '.join(wrong))}.")
    if task.evaluator is not None:
        try:
            load_evaluator(task.evaluator)
        except ConfigError as error:
            raise ConfigError(f"{place}: {validation_errors.escape_line(_short_message(error))}") from error
    return task


def _short_message(error: ConfigError) -> str:
    """An evaluator names fields below `config`; here that is the task's field."""
    inner = str(error.__cause__)
    return f"evaluator.{inner}" if inner.startswith("config") else str(error)


def _find_unknown_name(field: str, kind: PluginKind, name: str) -> list[str]:
    known = list_names(kind)
    return [] if name in known else [f"{field}: there is no {name!r}; known: {', '.join(known)}"]


# Paths on this machine: relative ones are relative to the task's file, and what they name must be there.


def _resolve_paths(task: TaskRequest, folder: Path) -> list[str]:
    """Makes every path of the task absolute; what is wrong with them."""
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
    """A folder begins with a dot or a slash, or with `build:`; everything else is a name that a registry knows."""
    if image is None:
        return None, []
    build, path = (_BUILD_PREFIX, image.removeprefix(_BUILD_PREFIX)) if image.startswith(_BUILD_PREFIX) else ("", image)
    if not build and not path.startswith(("./", "../")):
        return image, []
    path = _to_absolute(path, folder)
    return build + path, _find_missing(path, "upload_dir", "runtime.image")


def _resolve_config(value: Any, strategy: str, folder: Path) -> Any:
    """An evaluator's config may hold steps, and further evaluators with their own config."""
    if isinstance(value, list):
        return [_resolve_config(one, strategy, folder) for one in value]
    if not isinstance(value, dict):
        return value
    inner = _text_field(value, "strategy") or strategy
    resolved = {key: _resolve_config(one, inner, folder) for key, one in value.items()}
    if _text_field(value, "type") in _PATH_CHECKS:
        for key in _SOURCE_FIELDS:
            if isinstance(path := value.get(key), str):
                resolved[key] = _to_absolute(path, folder)
    for key in _path_fields(strategy):
        if isinstance(path := value.get(key), str):
            resolved[key] = _to_absolute(path, folder)
    return resolved


def _path_fields(strategy: str) -> tuple[str, ...]:
    """The fields of an evaluator's config that name a place on this machine."""
    found = getattr(load("evaluators", strategy), "paths", ()) if strategy in list_names("evaluators") else ()
    return tuple(found)


def _text_field(table: dict[str, Any], key: str) -> str:
    return found if isinstance(found := table.get(key), str) else ""


def _find_config_problems(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _find_config_problems(one, f"{place}[{number}]")
    elif isinstance(value, dict):
        if (kind := _text_field(value, "type")) in _PATH_CHECKS:
            for key in _SOURCE_FIELDS:
                if isinstance(path := value.get(key), str):
                    yield from _find_missing(path, kind, f"{place}.{key}")
        for key, one in value.items():
            yield from _find_config_problems(one, f"{place}.{key}")

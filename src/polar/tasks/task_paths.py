"""A task's paths on this machine: relative ones are relative to its file, and what they name must be there."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar.plugins import load, names
from polar.records.task import Step, TaskRequest, UploadDir, UploadFile

_BUILD_PREFIX = "build:"
_SOURCE_FIELDS = ("source", "src", "local_path", "path")
_PATH_CHECKS = {"upload_file": os.path.isfile, "upload_dir": os.path.isdir}


def resolve_paths(task: TaskRequest, folder: Path) -> list[str]:
    """Makes every path of the task absolute; what is wrong with them."""
    problems = []
    for name, steps in (("prepare", task.runtime.prepare), ("eval_prepare", task.runtime.eval_prepare or [])):
        for number, step in enumerate(steps):
            problems += _resolve_step(step, f"runtime.{name}[{number}]", folder)
    task.runtime.image, problem = _resolve_image(task.runtime.image, folder)
    problems += problem
    if task.agent.skills_path is not None:
        task.agent.skills_path = to_absolute(task.agent.skills_path, folder)
        problems += _find_missing(task.agent.skills_path, "upload_dir", "agent.skills_path")
    if task.evaluator is not None:
        task.evaluator.config = _resolve_config(task.evaluator.config, task.evaluator.strategy, folder)
        problems += _find_config_problems(task.evaluator.config, "evaluator.config")
    return problems


def to_absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / path)


def _resolve_step(step: Step, place: str, folder: Path) -> list[str]:
    if isinstance(step, UploadFile | UploadDir) and step.source is not None:
        step.source = to_absolute(step.source, folder)
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
    path = to_absolute(path, folder)
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
                resolved[key] = to_absolute(path, folder)
    for key in _path_fields(strategy):
        if isinstance(path := value.get(key), str):
            resolved[key] = to_absolute(path, folder)
    return resolved


def _path_fields(strategy: str) -> tuple[str, ...]:
    """The fields of an evaluator's config that name a place on this machine."""
    found = getattr(load("evaluators", strategy), "paths", ()) if strategy in names("evaluators") else ()
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

"""A task's paths on this machine: relative ones are relative to its file, and what they name must be there."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar.plugins import load, names
from polar.rollout.models import Step, TaskRequest, UploadDir, UploadFile

_BUILD = "build:"
_SOURCE = ("source", "src", "local_path", "path")
_UPLOADS = {"upload_file": os.path.isfile, "upload_dir": os.path.isdir}


def resolve(task: TaskRequest, folder: Path) -> list[str]:
    """Makes every path of the task absolute; what is wrong with them."""
    problems = []
    for name, steps in (("prepare", task.runtime.prepare), ("eval_prepare", task.runtime.eval_prepare or [])):
        for number, step in enumerate(steps):
            problems += _resolve_step(step, f"runtime.{name}[{number}]", folder)
    task.runtime.image, problem = _image(task.runtime.image, folder)
    problems += problem
    if task.agent.skills_path is not None:
        task.agent.skills_path = absolute(task.agent.skills_path, folder)
        problems += _missing(task.agent.skills_path, "upload_dir", "agent.skills_path")
    if task.evaluator is not None:
        task.evaluator.config = _config(task.evaluator.config, task.evaluator.strategy, folder)
        problems += _config_problems(task.evaluator.config, "evaluator.config")
    return problems


def absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / path)


def _resolve_step(step: Step, place: str, folder: Path) -> list[str]:
    if isinstance(step, UploadFile | UploadDir) and step.source is not None:
        step.source = absolute(step.source, folder)
        return _missing(step.source, step.type, f"{place}.source")
    return []


def _missing(path: str, kind: str, field: str) -> list[str]:
    if _UPLOADS[kind](path):
        return []
    return [f"{field}: there is no {'file' if kind == 'upload_file' else 'folder'} {path!r}"]


def _image(image: str | None, folder: Path) -> tuple[str | None, list[str]]:
    """A folder begins with a dot or a slash, or with `build:`; everything else is a name that a registry knows."""
    if image is None:
        return None, []
    build, path = (_BUILD, image.removeprefix(_BUILD)) if image.startswith(_BUILD) else ("", image)
    if not build and not path.startswith(("./", "../")):
        return image, []
    path = absolute(path, folder)
    return build + path, _missing(path, "upload_dir", "runtime.image")


def _config(value: Any, strategy: str, folder: Path) -> Any:
    """An evaluator's config may hold steps, and further evaluators with their own config."""
    if isinstance(value, list):
        return [_config(one, strategy, folder) for one in value]
    if not isinstance(value, dict):
        return value
    inner = _text(value, "strategy") or strategy
    resolved = {key: _config(one, inner, folder) for key, one in value.items()}
    if _text(value, "type") in _UPLOADS:
        for key in _SOURCE:
            if isinstance(path := value.get(key), str):
                resolved[key] = absolute(path, folder)
    for key in _paths(strategy):
        if isinstance(path := value.get(key), str):
            resolved[key] = absolute(path, folder)
    return resolved


def _paths(strategy: str) -> tuple[str, ...]:
    """The fields of an evaluator's config that name a place on this machine."""
    found = getattr(load("evaluators", strategy), "paths", ()) if strategy in names("evaluators") else ()
    return tuple(found)


def _text(table: dict[str, Any], key: str) -> str:
    return found if isinstance(found := table.get(key), str) else ""


def _config_problems(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _config_problems(one, f"{place}[{number}]")
    elif isinstance(value, dict):
        if (kind := _text(value, "type")) in _UPLOADS:
            for key in _SOURCE:
                if isinstance(path := value.get(key), str):
                    yield from _missing(path, kind, f"{place}.{key}")
        for key, one in value.items():
            yield from _config_problems(one, f"{place}.{key}")

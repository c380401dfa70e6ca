"""What stands in a task file: tables, whatever the format, and where each was found."""

import datetime
import json
import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from polar.errors import ConfigError

TASK_FILE_SUFFIXES = (".toml", ".yaml", ".yml", ".json", ".jsonl")


class TaskTable(Struct, frozen=True):
    """A task as its author wrote it."""

    table: dict[str, Any]
    location: str  # the file, and the line or number where it holds several
    name: str  # what it is called if it doesn't say
    folder: Path  # what its paths are relative to


def read_task_file(path: Path) -> list[TaskTable]:
    """The tasks of one file."""
    if path.suffix == ".jsonl":
        return list(_read_json_lines(path))
    document = to_json_value(_parse(path), str(path))
    listed = document.get("tasks") if isinstance(document, dict) and set(document) == {"tasks"} else document
    if not isinstance(listed, list):
        return [_to_task_table(listed, str(path), path.stem, path)]
    if not listed:
        raise ConfigError(f"{path}: it holds no task.")
    return [
        _to_task_table(table, f"{path}: task {number}", f"{path.stem}-{number}", path)
        for number, table in enumerate(listed, 1)
    ]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: it can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: this is not UTF-8.") from error


def read_toml(path: Path) -> dict[str, Any]:
    table = to_json_value(_parse_with(tomllib.loads, path), str(path))
    assert isinstance(table, dict)
    return table


def to_json_value(value: Any, place: str) -> Any:
    """A document as JSON could hold it, since tasks travel as JSON: dates as text, no infinite numbers."""
    try:
        return _to_json_value(value)
    except RecursionError:
        raise ConfigError(f"{place}: it is nested too deeply.") from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: the text {error.object[:40]!r} is not Unicode.") from error
    except ValueError as error:
        raise ConfigError(f"{place}: {error}.") from error


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"the name {bad[0]!r} of a field is not text: put it in quotes")
        return {key: _to_json_value(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_to_json_value(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number that a task can have")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, str) and not value.isascii():
        value.encode()  # half of a surrogate pair can't be written anywhere
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"a value of type {type(value).__name__} has no place in a task")


def _parse(path: Path) -> Any:
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    return _parse_with(parsers.get(path.suffix, yaml.safe_load), path)


def _parse_with(parse: Callable[[str], Any], path: Path) -> Any:
    text = read_text(path)
    try:
        return parse(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: this is not valid TOML: {error}.") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}: {where}: this is not valid JSON: {error.msg}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ConfigError(f"{path}: {where}this is not valid YAML: {error.problem or error.context}.") from error
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # a character or a date that can't be
        raise ConfigError(f"{path}: it can't be read: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply.") from None


def _read_json_lines(path: Path) -> Iterator[TaskTable]:
    found = False
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        found, place = True, f"{path}: line {number}"
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: this is not valid JSON: {error.msg} (column {error.colno}).") from error
        except ValueError as error:
            raise ConfigError(f"{place}: it can't be read: {error}.") from error
        except RecursionError:
            raise ConfigError(f"{place}: it is nested too deeply.") from None
        yield _to_task_table(to_json_value(document, place), place, f"{path.stem}-{number}", path)
    if not found:
        raise ConfigError(f"{path}: it holds no task.")


def _to_task_table(table: Any, place: str, name: str, path: Path) -> TaskTable:
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: a task is a table of fields, and this is {_describe(table)}.")
    return TaskTable(table, place, name, path.parent)


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    return "a list" if isinstance(value, list) else f"{value!r:.40}"

"""The reference, made from the code: what is described there can't differ from what is.

    pydantic models   -> settings, task files, training settings
    click commands    -> the command line
    FastAPI's routes  -> the control plane; dialects' routes -> the data plane
    polar.__all__     -> the Python API
    entry points      -> plug-ins

`collect_*` functions give the names that a page must have, which tests/docs compares; `render_*` functions write the
pages.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin
from unittest.mock import Mock

import click
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import polar
from polar import testing
from polar.cli.main import cli
from polar.config import ServerSettings, Settings
from polar.records.task import TaskRequest
from polar.rollout.routes.app import create_app
from polar.rollout.routes.service_parts import ServiceParts
from polar.train.settings import TrainSettings

PLUGIN_GROUPS = {
    "polar.dialects": "providers' wire formats",
    "polar.engines": "inference engines (`[engine] kind`)",
    "polar.harnesses": "agents' presets (`agent.harness`, `--harness`)",
    "polar.runtimes": "sandboxes (`runtime.backend`, `--backend`)",
    "polar.evaluators": "graders (`evaluator.strategy`)",
    "polar.builders": "exchanges to traces (`builder.strategy`, `--builder`)",
    "polar.exporters": "traces to trainers' formats (`polar export --format`)",
    "polar.bridges": "other trainers' loops",
    "polar.weight_sync": "how engines are given new weights",
}
_GENERATED = "*Generated from the code by `make docs`.*\n"


def build_reference() -> dict[str, str]:
    """The pages of the reference, by their names."""
    return {
        "settings.md": render_settings(),
        "tasks.md": render_tasks(),
        "training.md": render_training(),
        "cli.md": render_commands(),
        "http-api.md": render_control_plane(),
        "data-plane.md": render_data_plane(),
        "python-api.md": render_python(),
        "plugins.md": render_plugins(),
    }


# Settings


def collect_settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings of a model by their dotted names, those of its sections after it."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for nested in _find_models(field.annotation):
            yield from collect_settings(nested, f"{prefix}{name}.{_repeated(field.annotation)}")


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _find_models(part)]


def _repeated(annotation: Any) -> str:
    """What stands for the key or the number in the name of a setting that is a table or list of tables."""
    origin = get_origin(annotation)
    return "NAME." if origin is dict else "N." if origin is list else ""


def render_settings() -> str:
    text = [
        "# Settings\n",
        _GENERATED,
        "`polar.toml` in the working folder, or the file that `--config` names; everything is optional. A variable "
        "`POLAR_SECTION__KEY` wins over the file (lists and tables as JSON), and an option of the command line over "
        "both. A setting that isn't known is an error.\n",
    ]
    for name, field in Settings.model_fields.items():
        [model] = _find_models(field.annotation)
        header = f"[{name}.NAME]" if _repeated(field.annotation) else f"[{name}]"
        text += [f"## `{header}`\n", _first_paragraph(model.__doc__ if model.__doc__ != BaseModel.__doc__ else None)]
        text.append(_settings_table(model))
    text.append("## `[engine.options]`\n\nSettings of an engine's own kind.\n")
    for point in sorted(entry_points(group="polar.engines"), key=lambda point: point.name):
        if options := _engine_options_table(point):
            text += [f"### `{point.name}`\n", options]
    return _join(text)


def _engine_options_table(point: EntryPoint) -> str:
    """Of a settings class ...Options in the engine's module or beside it; else of the engine's own command."""
    package = point.module.rpartition(".")[0]
    for name in (point.module, f"{package}.options"):
        for value in vars(import_module(name)).values() if _is_module(name) else ():
            if isinstance(value, type) and issubclass(value, BaseModel) and value.__name__.endswith("Options"):
                return _settings_table(value)
    if _is_module(f"{package}.__main__") and point.module.rpartition(".")[2] == "engine":
        return _server_options_table(import_module(f"{package}.__main__").main)
    return ""


def _server_options_table(command: click.Command) -> str:
    """Options of an engine that is launched as a server of its own, as settings."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    rows = [
        f"| `{option.opts[-1].removeprefix('--').replace('-', '_')}` | {_cell(option.help or '')} | "
        f"{f'`{json.dumps(option.default)}`' if isinstance(option.default, (str, int, float)) else ''} |"
        for option in options
        if not (option.help or "").startswith("With --random") and option.name not in _ONLY_ON_THE_COMMAND_LINE
    ]
    return "\n".join(["| setting | | default |", "|---|---|---|", *rows]) + "\n"


_ONLY_ON_THE_COMMAND_LINE = {"random_seed"}


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def render_tasks() -> str:
    text = ["# Task files\n", _GENERATED, "What these fields mean together: [Tasks](../tasks.md).\n"]
    return _join([*text, _settings_table(TaskRequest)])


def render_training() -> str:
    text = ["# Training settings\n", _GENERATED, "The file that `polar train` takes: [Training](../training.md).\n"]
    return _join([*text, _settings_table(TrainSettings)])


def _settings_table(model: type[BaseModel]) -> str:
    rows = ["| setting | type | default | |", "|---|---|---|---|"]
    for name, field in collect_settings(model):
        description = _cell(field.description or _docstrings(model).get(name, ""))
        rows.append(f"| `{name}` | {_cell(_type_name(field.annotation))} | {_default(field)} | {description} |")
    return "\n".join(rows) + "\n"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    return {
        name: _first_paragraph(nested.__doc__)
        for name, field in model.model_fields.items()
        for nested in _find_models(field.annotation)
        if nested.__doc__ and nested.__doc__ != BaseModel.__doc__
    }


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else None
    if value is None or value in ([], {}) or isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value, default=str)}`"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments if part is not type(None))
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


# Commands


def collect_commands(group: click.Group = cli, prefix: str = "polar") -> Iterator[tuple[str, click.Command]]:
    """All commands by what is typed to call them."""
    context = click.Context(group, info_name=prefix)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{prefix} {name}", command
        if isinstance(command, click.Group):
            yield from collect_commands(command, f"{prefix} {name}")


def render_commands() -> str:
    text = ["# Command line\n", _GENERATED]
    for name, command in collect_commands():
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        text += [f"## `{name}`\n", f"```text\n{name} {usage}\n```\n", inspect.cleandoc(command.help or "") + "\n"]
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        rows = [_option_row(option, context) for option in options if not option.hidden]
        if rows:
            text.append("\n".join(["| option | |", "|---|---|", *rows]) + "\n")
    return _join(text)


def _option_row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    flags, text = record if record is not None else (", ".join(option.opts), "")
    return f"| {_code_cell(flags)} | {_cell(text)} |"


# HTTP


def build_app() -> FastAPI:
    """The control plane's app, without a service behind it: routes call its parts only when they are called."""
    parts: dict[str, Any] = {name: Mock() for name in ServiceParts.__annotations__}
    return create_app(ServiceParts(**parts | {"settings": ServerSettings()}))


def collect_operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def render_control_plane() -> str:
    document = build_app().openapi()
    text = [
        "# Control plane\n",
        _GENERATED,
        "For operators, trainers and nodes. [The rollout service](../service.md) says what the calls are for. "
        'Bodies are JSON. Errors have the body `{"detail": ...}`. Any call may also be answered with '
        + "; ".join(f"{code} ({meaning})" for code, meaning in _ANY_ROUTE.items())
        + ".\n",
    ]
    for method, path, operation in collect_operations(document):
        text += [f"## `{method} {path}`\n", _plain(operation.get("description") or operation.get("summary", "")) + "\n"]
        text += [_parameters_table(operation), _body_lines(operation), _responses_table(operation)]
    text.append("## Schemas\n")
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        text += [f"### {name}\n", _plain(_first_paragraph(schema.get("description"))), _schema_table(schema)]
    return _join(text)


def _parameters_table(operation: dict[str, Any]) -> str:
    rows = [
        f"| `{parameter['name']}` | {parameter['in']} | {_cell(_schema_name(parameter.get('schema', {})))} | "
        f"{_cell(parameter.get('description', ''))} |"
        for parameter in operation.get("parameters", [])
    ]
    return "\n".join(["| parameter | in | type | |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def _body_lines(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return "".join(f"Body (`{media}`): {_schema_name(of.get('schema', {}))}\n" for media, of in content.items())


def _responses_table(operation: dict[str, Any]) -> str:
    rows = []
    for code, response in sorted(operation["responses"].items()):
        if int(code) in _ANY_ROUTE:
            continue
        kinds = [_schema_name(content.get("schema", {})) for content in response.get("content", {}).values()]
        rows.append(
            f"| {code} | {_cell(response.get('description', ''))} | {_cell(' or '.join(filter(None, kinds)))} |"
        )
    if not rows:
        return ""
    return "\n".join(["| status | | body |", "|---|---|---|", *rows]) + "\n"


_ANY_ROUTE = {
    401: "the token is missing, or is another one",
    403: "without a token, only this machine may call, under its own name",
    422: "something in the request is wrong; `detail` says what",
    503: "the store failed: try again",
}
"""Statuses that any route may answer with."""


def _schema_table(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_cell(_schema_name(field))} | {'required' if name in required else ''} | "
        f"{_cell(field.get('description', ''))} |"
        for name, field in schema.get("properties", {}).items()
    ]
    if not rows:
        return f"{_cell(_schema_name(schema))}\n"
    return "\n".join(["| field | type | | |", "|---|---|---|---|", *rows]) + "\n"


def _schema_name(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{_slug(name)})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(filter(None, map(_schema_name, schema[key]))))
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_schema_name(schema.get('items', {})) or 'anything'}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def collect_dialect_routes() -> Iterator[tuple[str, str, str]]:
    """Method, path and dialect of all routes of the data plane."""
    for point in sorted(entry_points(group="polar.dialects"), key=lambda point: point.name):
        for route in point.load().routes:
            yield route.method, _readable_pattern(route.path.pattern), point.name


def _readable_pattern(pattern: str) -> str:
    named = re.sub(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)", r"{\1}", pattern.strip("^$"))
    return re.sub(r"\(\?:([^()]*)\)", r"(\1)", re.sub(r"\\(.)", r"\1", named)).replace("/?", "")


def render_data_plane() -> str:
    routes = dict.fromkeys(collect_dialect_routes())
    rows = [f"| {_code_cell(f'{method} {path}')} | {dialect} |" for method, path, dialect in routes]
    return _join(
        [
            "# Data plane\n",
            _GENERATED,
            "What agents call. A session's key is read from where the provider's clients send it "
            "(`Authorization: Bearer`, `x-api-key`, `x-goog-api-key`, `?key=`), or from the path: `/s/KEY/...` in "
            "front of any route. Bodies are the provider's, as it documents them, and errors have its shape.\n",
            "\n".join(["| call | dialect |", "|---|---|", *rows]) + "\n",
        ]
    )


# Python


def collect_python_names() -> list[str]:
    return sorted(polar.__all__)


def render_python() -> str:
    text = ["# Python API\n", _GENERATED, "`import polar`. All else may change without notice.\n"]
    for name in collect_python_names():
        text += [f"## `polar.{name}`\n", *_describe(name, getattr(polar, name))]
    text.append("## `polar.testing`\n\nContract suites for plug-ins: [how to use them](../plugins.md).\n")
    suites = [getattr(testing, name) for name in testing.__all__]
    rows = [
        f"| `{suite.__name__}` | {_cell(_first_sentence(suite.__doc__ or import_module(suite.__module__).__doc__))} |"
        for suite in suites
    ]
    text.append("\n".join(["| name | |", "|---|---|", *rows]) + "\n")
    return _join(text)


def _describe(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield f"`{value!r}`\n"
        return
    yield _signature(name, value)
    yield _docstring(value)
    if not isinstance(value, type):
        return
    if issubclass(value, BaseModel):
        yield _settings_table(value)
        return
    for method, function in sorted(vars(value).items()):
        documented = function.fget if isinstance(function, property) else function
        if method.startswith("_") or not callable(documented):
            continue
        yield f"### `{name}.{method}`\n"
        if not isinstance(function, property):
            yield _signature(method, getattr(value, method))
        yield _docstring(documented)


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    code = re.sub(r"<function [^<]*(<lambda>)?.*?>", "...", f"{name}{signature}")
    code = re.sub(r"\b(?:polar|typing|collections)(?:\.\w+)*\.(\w+)", r"\1", code)
    return f"```python\n{code}\n```\n"


def _docstring(value: Any) -> str:
    """Indented parts are shown as they are written."""
    text = inspect.getdoc(value) or ""
    return _preformat_columns(text) + "\n"


def _preformat_columns(text: str) -> str:
    """Paragraphs that are aligned in columns, or are code, as code blocks."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```text\n{paragraph}\n```"
        if re.search(r"^(\s{2,}\S|\S+\s{2,}\S|with )", paragraph, re.MULTILINE)
        else paragraph
        for paragraph in paragraphs
    )


def collect_plugins() -> dict[str, list[EntryPoint]]:
    """Polar's own plug-ins by group."""
    found = {group: sorted(entry_points(group=group), key=lambda point: point.name) for group in PLUGIN_GROUPS}
    return {group: [point for point in points if point.value.startswith("polar.")] for group, points in found.items()}


def render_plugins() -> str:
    text = [
        "# Kinds of plug-ins\n",
        _GENERATED,
        "A package registers a plug-in as an entry point of one of these groups. The name is what settings, tasks and "
        "commands use.\n",
    ]
    for group, points in collect_plugins().items():
        if not points:
            continue
        rows = [
            f"| `{point.name}` | `{point.value}` | {_cell(_first_sentence(_own_docstring(point)))} |"
            for point in points
        ]
        text += [f"## `{group}`\n", f"{PLUGIN_GROUPS[group][0].upper()}{PLUGIN_GROUPS[group][1:]}.\n"]
        text.append("\n".join(["| name | is | |", "|---|---|---|", *rows]) + "\n")
    return _join(text)


def _own_docstring(point: EntryPoint) -> str:
    """The plug-in's docstring; where it has none, its module's."""
    own = point.load().__doc__
    module = import_module(point.module)
    return inspect.cleandoc(own or module.__doc__ or "")


# Text


def _first_paragraph(text: str | None) -> str:
    return inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ") + "\n" if text else ""


def _first_sentence(text: str | None) -> str:
    paragraph = _first_paragraph(text)
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\|", _plain(" ".join(text.split())))


def _code_cell(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _plain(text: str) -> str:
    """Without what Markdown would take for markup of its own."""
    return re.sub(r"(?<![`\w])<(\w+)>", r"`<\1>`", text).replace("\\[", "[")


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name.lower()).strip("-")


def _join(parts: list[str]) -> str:
    return "\n".join(part for part in parts if part)

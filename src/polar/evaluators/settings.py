"""An evaluator's part of the task, read into its model."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polar.errors import ConfigError
from polar.records.task import RequestModel

_Settings = TypeVar("_Settings", bound=RequestModel)
_UNKNOWN_FIELD = "extra_forbidden"
_UPLOAD_TYPES = ("upload_file", "upload_dir")
_MESSAGES = {
    _UNKNOWN_FIELD: "there is no such field",
    "missing": "it must be given",
    "string_type": "it must be text",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "list_type": "it must be a list",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
    "model_attributes_type": "it must be a table",
    "greater_than": "it must be greater than {gt:g}",
    "greater_than_equal": "it must be {ge:g} or more",
    "literal_error": "it must be {expected}",
    "too_short": "it is empty",
    "string_too_short": "it is empty",
    "union_tag_not_found": f"its `type` is missing: {' or '.join(_UPLOAD_TYPES)}",
    "union_tag_invalid": f"its `type` must be {' or '.join(_UPLOAD_TYPES)}",
}


def parse_config(model: type[_Settings], config: dict[str, Any]) -> _Settings:
    """Raises ConfigError, which names the field: one that isn't known before any other, as a misspelt field is why
    another is missing."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda problem: problem["type"] != _UNKNOWN_FIELD)
        raise ConfigError(f"{_format_field(problem)}: {_format_message(problem)}.") from error


def _format_field(problem: ErrorDetails) -> str:
    """As it is written in the task: which form of several was tried is pydantic's word."""
    steps = problem["loc"][:1] if _is_in_union(problem) else problem["loc"]
    written = (
        str(step)
        for before, step in zip(("", *steps), steps, strict=False)
        if not (isinstance(before, int) and step in _UPLOAD_TYPES)
    )
    return ".".join(("config", *written))


def _format_message(problem: ErrorDetails) -> str:
    if _is_in_union(problem):
        return "it must be text, or a list of words"
    known = _MESSAGES.get(problem["type"])
    if known is None:
        return problem["msg"].removeprefix("Value error, ").rstrip(".")
    return known.format_map(problem.get("ctx", {}))


def _is_in_union(problem: ErrorDetails) -> bool:
    """A command is text, or a list."""
    return problem["loc"][:1] in (("command",), ("test_command",)) and len(problem["loc"]) > 1

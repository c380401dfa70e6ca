"""An evaluator's part of the task, read into its model."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polar.errors import ConfigError
from polar.rollout.models import Model

_Settings = TypeVar("_Settings", bound=Model)
_UNKNOWN = "extra_forbidden"
_UPLOADS = ("upload_file", "upload_dir")
_MESSAGES = {
    _UNKNOWN: "there is no such field",
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
    "union_tag_not_found": f"its `type` is missing: {' or '.join(_UPLOADS)}",
    "union_tag_invalid": f"its `type` must be {' or '.join(_UPLOADS)}",
}


def read(model: type[_Settings], config: dict[str, Any]) -> _Settings:
    """Raises ConfigError, which names the field: one that isn't known before any other, as a misspelt field is why
    another is missing."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda problem: problem["type"] != _UNKNOWN)
        raise ConfigError(f"{_field(problem)}: {_message(problem)}.") from error


def _field(problem: ErrorDetails) -> str:
    """As it is written in the task: which form of several was tried is pydantic's word."""
    steps = problem["loc"][:1] if _in_a_form(problem) else problem["loc"]
    written = (
        str(step)
        for before, step in zip(("", *steps), steps, strict=False)
        if not (isinstance(before, int) and step in _UPLOADS)
    )
    return ".".join(("config", *written))


def _message(problem: ErrorDetails) -> str:
    if _in_a_form(problem):
        return "it must be text, or a list of words"
    known = _MESSAGES.get(problem["type"])
    if known is None:
        return problem["msg"].removeprefix("Value error, ").rstrip(".")
    return known.format_map(problem.get("ctx", {}))


def _in_a_form(problem: ErrorDetails) -> bool:
    """A command is text, or a list."""
    return problem["loc"][:1] in (("command",), ("test_command",)) and len(problem["loc"]) > 1

"""What pydantic finds wrong, in short sentences that name the field as its author wrote it."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

_STEP_TYPES = ("upload_file", "upload_dir", "exec")
_MESSAGES = {
    "extra_forbidden": "there is no such field",
    "missing": "it is missing",
    "model_type": "this is a table of fields",
    "dict_type": "this is a table",
    "union_tag_not_found": f"its `type` is missing: {', '.join(_STEP_TYPES)}",
    "union_tag_invalid": f"its `type` is one of {', '.join(_STEP_TYPES)}",
}


def format_validation_errors(
    error: ValidationError | Iterable[Mapping[str, Any]], prefix: str = "", subject: str = "the task"
) -> str:
    """Every problem once: `runtime.cpus: ...; runtime.prepare[0].target: ...`. Those of an error, or as a server tells
    them. `whole` is what is wrong where no field is."""
    problems = error.errors() if isinstance(error, ValidationError) else error
    messages = {
        f"{prefix}{_format_field(problem) or subject}: {_format_message(problem)}": None for problem in problems
    }
    return escape_line("; ".join(messages))


def escape_line(text: str) -> str:
    """What stands in a file may be in a message: line ends and the like are spelled out."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _format_message(problem: Mapping[str, Any]) -> str:
    if template := _MESSAGES.get(problem.get("type", "")):
        return template
    message: str = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def _format_field(problem: Mapping[str, Any]) -> str:
    field = ""
    before: str | int | None = None
    for part in problem["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif not _is_union_branch(part, before):
            field += f".{part}" if field else part
        before = part
    return field


def _is_union_branch(part: str, before: str | int | None) -> bool:
    """Which form of several was tried: pydantic's word, and not in the file."""
    return (isinstance(before, int) and part in _STEP_TYPES) or (
        before in ("command", "cmd") and part in ("str", "list[str]")
    )

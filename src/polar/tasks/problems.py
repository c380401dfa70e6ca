"""What pydantic finds wrong, in short sentences that name the field as its author wrote it."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_STEPS = ("upload_file", "upload_dir", "exec")
_MESSAGES = {
    "extra_forbidden": "there is no such field",
    "missing": "it is missing",
    "model_type": "this is a table of fields",
    "dict_type": "this is a table",
    "union_tag_not_found": f"its `type` is missing: {', '.join(_STEPS)}",
    "union_tag_invalid": f"its `type` is one of {', '.join(_STEPS)}",
}


def listed(error: ValidationError, under: str = "") -> str:
    """Every problem once: `runtime.cpus: ...; runtime.prepare[0].target: ...`."""
    found = {f"{under}{_field(problem)}: {_message(problem)}": None for problem in error.errors()}
    return one_line("; ".join(found))


def one_line(text: str) -> str:
    """What stands in a file may be in a message: line ends and the like are spelled out."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _message(problem: ErrorDetails) -> str:
    if known := _MESSAGES.get(problem["type"]):
        return known
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def _field(problem: ErrorDetails) -> str:
    field = ""
    before: str | int | None = None
    for part in problem["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif not _is_choice(part, before):
            field += f".{part}" if field else part
        before = part
    return field or "the task"


def _is_choice(part: str, before: str | int | None) -> bool:
    """Which form of several was tried: pydantic's word, and not in the file."""
    return (isinstance(before, int) and part in _STEPS) or (
        before in ("command", "cmd") and part in ("str", "list[str]")
    )

"""Evaluators: judge a session by what its agent left behind.

An evaluator returns a Verdict: a finite reward, or a reason for having none. The line between the two:

- What the agent did or failed to do is a reward, however it failed: its code loops, uses all memory, deletes the files
  to be graded, or writes too much to be copied. Nothing that an agent can cause excuses it.
- What the platform failed to do is a reason, never 0: a runtime that can't be made, a judge that doesn't answer, a
  task whose grader is missing. An evaluator may simply raise `SandboxError`: the node turns it into a reason.

An evaluator also reports evidence of tampering (`Verdict.evidence`). The task's `suspicious` setting decides what that
costs, and the node applies it.

By default, evaluation happens in a fresh runtime, after every process of the agent is dead, with the agent's files
copied from outside and the grader's files put over them.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from msgspec import Struct, field
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polar.config import JudgeSettings
from polar.errors import ConfigError, PolarError
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Verdict
from polar.records.task import RequestModel, TaskRequest
from polar.runtimes.base import Runtime

EndReason = Literal["finished", "timeout", "length"]


class Outcome(Struct, frozen=True):
    """How the harness's run ended."""

    # finished: by itself; timeout: the task's seconds; length: turns, tokens or the model's context
    end_reason: EndReason = field(name="ended")
    exit_code: int | None  # None where it was killed
    seconds: float
    out_of_memory: bool = False


class GraderError(PolarError):
    """The task's grader can't work, whatever the agent did: becomes the reason `grader_failed`."""


class UngradableWorkError(PolarError):
    """What the agent left can't be graded, by its own fault: becomes a reward of 0 with this message."""


class GradingContext(Protocol):
    """What an evaluator is given of a session."""

    task: TaskRequest
    session_id: str
    outcome: Outcome
    agent_runtime: Runtime
    """The agent's runtime. Every process in it is dead, and its files can be read; if the task asked for no fresh
    runtime, it is running, and `live` is true."""

    live: bool
    initial_workspace: Path | None
    """A copy of the workspace from before the agent began; None where it was too large to copy."""

    scratch: Path
    """An empty folder on this machine for the agent's files, removed afterwards."""

    logs: Path
    """A folder for the grader's output, kept with the session."""

    exchanges: list[Exchange]
    """Every model call of the session."""

    judges: dict[str, JudgeSettings]
    """Judge models, as the operator configured them."""

    answer: str
    """The main agent's last text."""

    evidence: list[Evidence]
    """Evidence of tampering so far. Evidence added here counts even if the evaluator raises afterwards; otherwise the
    verdict's `evidence` is enough."""

    async def create_fresh_runtime(self) -> Runtime:
        """Makes a runtime that no agent has been in, prepared like the agent's and then by `eval_prepare`, without
        network. If the task asked for no fresh runtime, returns the agent's."""
        ...


class Evaluator(Protocol):
    """Constructed with its part of the task (`config`); raises ConfigError, naming the field, where that is invalid."""

    needs_fresh_runtime: ClassVar[bool]
    """Whether it calls `create_fresh_runtime`: one is then made while the agent still runs."""

    # An evaluator may also have `private_paths: Sequence[str]`, absolute or relative to the workspace: where its files
    # will be. An agent that names one before it was shown to it is recorded as having looked for it.

    def __init__(self, config: dict[str, Any]) -> None: ...

    async def evaluate(self, work: GradingContext) -> Verdict: ...


_Config = TypeVar("_Config", bound=RequestModel)
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


def parse_config(model: type[_Config], config: dict[str, Any]) -> _Config:
    """Validates an evaluator's part of the task. Raises ConfigError for one field: an unknown one first, since a
    misspelt field explains a missing one."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda problem: problem["type"] != _UNKNOWN_FIELD)
        raise ConfigError(f"{_format_field(problem)}: {_format_message(problem)}.") from error


def _format_field(problem: ErrorDetails) -> str:
    """The field's path as written in the task, without the names that pydantic gives to the forms of a union."""
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
    """Whether the field is a command, which is text or a list."""
    return problem["loc"][:1] in (("command",), ("test_command",)) and len(problem["loc"]) > 1

"""An evaluator: what a session earned, told from what the agent left behind.

It gives a Verdict: a finite reward, or a reason why there is none. The line between the two:

- What the agent did or failed to do is a reward, however it failed: its code loops, eats all memory, deletes what is
  to be graded, writes too much to be taken. Nothing that an agent can bring about excuses it.
- What the platform failed to do is a reason, never 0: a runtime that can't be made, a judge that doesn't answer, a
  task whose own grader is not there. `SandboxError` may simply be raised: the node makes the reason of it.

It also reports evidence of tampering that it comes across (`Verdict.evidence`). What that costs the session is for the
task's `suspicious` setting to say, and for the node to apply.

By default it works in a fresh runtime, after every process of the agent's is dead, with the agent's files taken from
outside and the grader's own put over them.
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

    # by itself; by the task's seconds; by its turns or tokens, or the model's context
    end_reason: EndReason = field(name="ended")
    exit_code: int | None  # None where it was killed
    seconds: float
    out_of_memory: bool = False


class GraderError(PolarError):
    """The task's own grader can't do its work, whatever the agent did: becomes the reason `grader_failed`."""


class UngradableWorkError(PolarError):
    """What the agent left can't be graded, and that is its own doing: a reward of 0, with this sentence."""


class GradingContext(Protocol):
    """What there is to judge."""

    task: TaskRequest
    session_id: str
    outcome: Outcome
    agent_runtime: Runtime
    """The agent's own runtime. Every process in it is dead, and its files can be taken; where the task asked for no
    fresh runtime, it is running, and `live` is true."""

    live: bool
    initial_workspace: Path | None
    """A copy of the workspace as it was before the agent began; None where it was too large to keep."""

    scratch: Path
    """An empty folder of this machine, removed afterwards. What is taken from the agent goes here."""

    logs: Path
    """A folder that is kept with the session: what the grader printed."""

    exchanges: list[Exchange]
    """Every model call of the session."""

    judges: dict[str, JudgeSettings]
    """Models that judge, as the operator configured them."""

    answer: str
    """The last thing that the (main) agent said."""

    evidence: list[Evidence]
    """Of tampering, so far. An evaluator may add to it before something that may fail: what stands here counts also
    where it raises afterwards. Otherwise its verdict's `evidence` is enough."""

    async def create_fresh_runtime(self) -> Runtime:
        """A runtime that no agent has been in, prepared as the agent's was, and then with `eval_prepare`; no network.
        A new one for each call. Where the task asked for no fresh runtime, the agent's own."""
        ...


class Evaluator(Protocol):
    """Made with the task's `config` for it; raises ConfigError where that can't be used, naming the field."""

    needs_fresh_runtime: ClassVar[bool]
    """Whether it calls `create_fresh_runtime`: then one is made ready while the agent still runs."""

    # An evaluator may also have `private_paths: Sequence[str]`, absolute or of the workspace: where its own files will
    # stand. An agent that names one before anything has shown it to the agent is recorded as having looked for it.

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
    """Reads an evaluator's part of the task into its model. Raises ConfigError, which names the field: one that isn't
    known before any other, as a misspelt field is why another is missing."""
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

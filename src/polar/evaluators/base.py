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
from typing import Any, ClassVar, Literal, Protocol

from msgspec import Struct, field

from polar.config import JudgeSettings
from polar.errors import PolarError
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Verdict
from polar.records.task import TaskRequest
from polar.runtimes.base import Runtime

EndReason = Literal["finished", "timeout", "length"]


class Outcome(Struct, frozen=True):
    """How the harness's run ended."""

    end_reason: EndReason = field(
        name="ended"
    )  # by itself; by the task's seconds; by its turns or tokens, or the model's context
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
    """Whether it calls `fresh`: then one is made ready while the agent still runs."""

    # An evaluator may also have `private_paths: Sequence[str]`, absolute or of the workspace: where its own files will
    # stand. An agent that names one before anything has shown it to the agent is recorded as having looked for it.

    def __init__(self, config: dict[str, Any]) -> None: ...

    async def evaluate(self, work: GradingContext) -> Verdict: ...

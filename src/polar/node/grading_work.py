"""What an evaluator is given of a session (evaluators.base.Work)."""

from pathlib import Path
from typing import Any, cast

from polar.config import JudgeSettings
from polar.evaluators.base import Outcome
from polar.node.task_plan import TaskPlan
from polar.node.warm_pool import WarmPool
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Session
from polar.records.task import TaskRequest
from polar.runtimes.base import CommandResult, Runtime
from polar.trajectory.conversations import read_call
from polar.trajectory.session import assign_session_roles
from polar.types import Text


class WatchedRuntime:
    """A runtime that remembers whether a command in it ran out of time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.timed_out = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run(self, argv: list[str], **options: Any) -> CommandResult:
        completed = await self._runtime.run(argv, **options)
        self.timed_out |= completed.timed_out
        return completed


class GradingWork:
    """A Work, whose fresh runtimes are the caller's to remove (`made`)."""

    def __init__(
        self,
        plan: TaskPlan,
        session: Session,
        exchanges: list[Exchange],
        calls: list[Exchange],
        outcome: Outcome,
        agent: Runtime,
        *,
        warm_pool: WarmPool,
        before: Path | None,
        scratch: Path,
        logs: Path,
        judges: dict[str, JudgeSettings],
        expects_runtime: bool,
        evidence: list[Evidence],
    ) -> None:
        self.task: TaskRequest = plan.task
        self._watched: list[WatchedRuntime] = []
        self.session_id = session.session_id
        self.outcome = outcome
        self.agent_runtime = self._watch(agent)
        self.live = plan.task.evaluator is not None and not plan.task.evaluator.refresh_runtime
        self.initial_workspace = before
        self.scratch = scratch
        self.logs = logs
        self.exchanges = exchanges
        self.judges = judges
        self.answer = last_answer(calls)
        self.evidence = evidence
        self.fresh_runtimes: list[Runtime] = []
        self.expects_runtime = expects_runtime  # a fresh one stands ready for this session, unless it has been taken
        self._grading_recipe = plan.grading_recipe
        self._warm_pool = warm_pool

    async def create_fresh_runtime(self) -> Runtime:
        if self.live:
            return self.agent_runtime
        expected, self.expects_runtime = self.expects_runtime, False
        runtime = await self._warm_pool.take(self._grading_recipe, expected=expected)
        self.fresh_runtimes.append(runtime)
        return self._watch(runtime)

    def _watch(self, runtime: Runtime) -> Runtime:
        watched = WatchedRuntime(runtime)
        self._watched.append(watched)
        return cast("Runtime", watched)

    @property
    def timed_out(self) -> bool:
        """Whether a command of the grader's ran out of time."""
        return any(watched.timed_out for watched in self._watched)


def find_main_calls(session: Session, exchanges: list[Exchange]) -> list[Exchange]:
    """Those of the agent that was given the task: not its titles, nor what it asked the gateway by itself. All of them,
    where none can be told to be that."""
    labels = assign_session_roles(session, [read_call(exchange) for exchange in exchanges])
    return [exchange for exchange in exchanges if labels[exchange.exchange_id].role == "main"] or exchanges


def last_answer(calls: list[Exchange]) -> str:
    """The last text that the agent said."""
    for exchange in reversed(calls):
        if exchange.reply is not None:
            text = "".join(part.text for part in exchange.reply.parts if isinstance(part, Text))
            if text.strip():
                return text
    return ""

"""What an evaluator is given of a session (evaluators.base.Work)."""

from pathlib import Path

from polar.config import JudgeSettings
from polar.evaluators.base import Outcome
from polar.node.plan import Plan
from polar.node.warm import Warm
from polar.rollout.models import TaskRequest
from polar.runtimes.base import Runtime
from polar.store.base import Exchange, Session
from polar.trajectory.conversations import call_of
from polar.trajectory.session import labelled
from polar.types import Text


class Graded:
    """A Work, whose fresh runtimes are the caller's to remove (`made`)."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        exchanges: list[Exchange],
        calls: list[Exchange],
        outcome: Outcome,
        agent: Runtime,
        *,
        warm: Warm,
        before: Path | None,
        scratch: Path,
        logs: Path,
        judges: dict[str, JudgeSettings],
        expected: bool,
    ) -> None:
        self.task: TaskRequest = plan.task
        self.session_id = session.session_id
        self.outcome = outcome
        self.agent = agent
        self.live = plan.task.evaluator is not None and not plan.task.evaluator.refresh_runtime
        self.before = before
        self.scratch = scratch
        self.logs = logs
        self.exchanges = exchanges
        self.judges = judges
        self.answer = answer_of(calls)
        self.made: list[Runtime] = []
        self.expected = expected  # a fresh one stands ready for this session, unless it has been taken
        self._grading = plan.grading
        self._warm = warm

    async def fresh(self) -> Runtime:
        if self.live:
            return self.agent
        expected, self.expected = self.expected, False
        runtime = await self._warm.take(self._grading, expected=expected)
        self.made.append(runtime)
        return runtime

    async def again(self) -> Runtime:
        if not self.live:
            await self.agent.restart()
        return self.agent


def main_calls(session: Session, exchanges: list[Exchange]) -> list[Exchange]:
    """Those of the agent that was given the task: not its titles, nor what it asked the gateway by itself. All of them,
    where none can be told to be that."""
    labels = labelled(session, [call_of(exchange) for exchange in exchanges])
    return [exchange for exchange in exchanges if labels[exchange.exchange_id].role == "main"] or exchanges


def answer_of(calls: list[Exchange]) -> str:
    """The last text that the agent said."""
    for exchange in reversed(calls):
        if exchange.reply is not None:
            text = "".join(part.text for part in exchange.reply.parts if isinstance(part, Text))
            if text.strip():
                return text
    return ""

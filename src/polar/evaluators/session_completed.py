"""`session_completed`: whether the harness came to its end by itself. For trying a set-up out, not for training: an
agent that gives up at once completes its session, too."""

from typing import Any, ClassVar

from polar.evaluators.base import GradingContext, parse_config
from polar.records.session import Verdict
from polar.records.task import RequestModel


class SessionCompleted:
    needs_fresh_runtime: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any]) -> None:
        parse_config(RequestModel, config)

    async def evaluate(self, work: GradingContext) -> Verdict:
        outcome = work.outcome
        completed = outcome.end_reason == "finished" and outcome.exit_code == 0
        return Verdict(float(completed), detail={"ended": outcome.end_reason, "exit_code": outcome.exit_code})

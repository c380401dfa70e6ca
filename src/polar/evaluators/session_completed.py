"""`session_completed`: whether the harness came to its end by itself. For trying a set-up out, not for training: an
agent that gives up at once completes its session, too."""

from typing import Any, ClassVar

from polar.evaluators import settings
from polar.evaluators.base import Work
from polar.rollout.models import Model
from polar.store.base import Verdict


class SessionCompleted:
    wants_fresh: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any]) -> None:
        settings.read(Model, config)

    async def evaluate(self, work: Work) -> Verdict:
        outcome = work.outcome
        completed = outcome.ended == "finished" and outcome.exit_code == 0
        return Verdict(float(completed), detail={"ended": outcome.ended, "exit_code": outcome.exit_code})

"""Evidence of tampering, from an evaluator through the node into the store, the folder and the result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polar.evaluators.base import GraderError, GradingContext
from polar.node.finished_session import FinishedSession
from polar.records.result import SessionResult
from polar.records.session import Evidence, Session, Verdict
from polar.records.task import TaskRequest
from polar.runtimes.base import SandboxError
from tests.integration.agents import task
from tests.integration.test_node import ONE_CALL, rollout

PROVEN = Evidence("canary_passed", "test_canary", True, "it must fail")
UNPROVEN = Evidence("test_edited", "tests/test_a.py")


class Reporting:
    """An evaluator that does what it is told to."""

    needs_fresh_runtime: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any]) -> None:
        self._evaluate: Callable[[GradingContext], Verdict] = config["evaluate"]

    async def evaluate(self, work: GradingContext) -> Verdict:
        return self._evaluate(work)


def fails(error: Exception, *evidence: Evidence) -> Callable[[GradingContext], Verdict]:
    def evaluate(work: GradingContext) -> Verdict:
        work.evidence.extend(evidence)
        raise error

    return evaluate


async def run(
    tmp_path: Path, evaluate: Callable[[GradingContext], Verdict], wanted: TaskRequest
) -> tuple[FinishedSession, Session, SessionResult]:
    async with rollout(tmp_path) as opened:
        plans = await opened.plan([wanted])
        plans[0].evaluator = Reporting({"evaluate": evaluate})
        (finished,) = [finished async for finished in opened.run(plans)]
        session = await opened.plane.store.find_session(finished.session_id)
        assert session is not None
        return finished, session, SessionResult.model_validate(await opened.build_result(plans[0], finished))


@pytest.mark.parametrize(
    ("evaluate", "policy", "reward", "reason"),
    [
        (lambda _: Verdict(1.0, evidence=[PROVEN]), "zero", 0.0, None),
        (lambda _: Verdict(1.0, evidence=[PROVEN]), "exclude", None, "suspicious"),
        (lambda _: Verdict(1.0, evidence=[PROVEN]), "keep", 1.0, None),
        (lambda _: Verdict(1.0, evidence=[UNPROVEN]), "zero", 1.0, None),
        (fails(SandboxError("it is gone"), PROVEN), "zero", 0.0, None),
        (fails(SandboxError("it is gone"), UNPROVEN), "zero", None, "sandbox_failed"),
        (fails(RuntimeError("a bug"), PROVEN), "exclude", None, "suspicious"),
        (fails(GraderError("it is broken"), PROVEN), "keep", None, "grader_failed"),
        (lambda _: Verdict(float("nan"), evidence=[PROVEN]), "zero", 0.0, None),
    ],
)
async def test_what_a_session_earns(
    tmp_path: Path, evaluate: Callable[[GradingContext], Verdict], policy: str, reward: float | None, reason: str | None
) -> None:
    wanted = task(ONE_CALL, evaluator={"strategy": "session_completed"}, suspicious=policy)
    finished, session, result = await run(tmp_path, evaluate, wanted)
    assert (session.reward, session.reason) == (result.reward, result.reason) == (reward, reason)
    (evidence,) = session.evidence
    assert [one.model_dump() for one in result.evidence] == [_document(evidence)]
    assert result.metadata["suspicious"] is evidence.proven
    written = json.loads((finished.folder / "verdict.json").read_text())
    assert (written["evidence"], written["suspicious"]) == ([_document(evidence)], evidence.proven)
    assert (result.error is None) == (reason is None)


async def test_the_agents_own_work_is_searched_for_the_graders_paths(tmp_path: Path) -> None:
    wanted = task(
        ONE_CALL + "; os.mkdir('.grader'); open('.grader/json.py', 'w').close()",
        runtime={
            "backend": "local",
            "eval_prepare": [{"type": "upload_file", "content": "1", "target": ".grader/expected.txt"}],
        },
        evaluator={"strategy": "session_completed"},
    )
    _, session, _ = await run(tmp_path, lambda _: Verdict(1.0), wanted)
    assert session.reward == 1
    assert [(one.kind, one.subject, one.proven) for one in session.evidence] == [("grader_path", ".grader", False)]


def _document(evidence: Evidence) -> dict[str, Any]:
    return {name: getattr(evidence, name) for name in Evidence.__struct_fields__}

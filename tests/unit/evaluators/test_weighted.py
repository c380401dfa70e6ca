import json
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.config import JudgeSettings
from polar.errors import ConfigError
from polar.evaluators.base import GraderError, GradingContext
from polar.evaluators.weighted import Weighted
from polar.records.session import Evidence, Verdict
from polar.runtimes.base import SandboxError
from polar.testing.grading import AgentWork, WorkFactory


def command(line: str, **part: Any) -> dict[str, Any]:
    return {"strategy": "command", "config": {"command": line}, **part}


RIGHT = {"strategy": "answer", "config": {"expected": "yes"}}
WRONG = {"strategy": "answer", "config": {"expected": "no"}}


@pytest.fixture
async def work(place: WorkFactory) -> AgentWork:
    work = await place.create_work("touch made")
    work.answer = "yes"
    return work


async def test_the_reward_is_the_mean_by_weight(work: AgentWork) -> None:
    parts = [command("test -e made", weight=3), {**WRONG, "name": "said"}]
    verdict = await Weighted({"parts": parts}).evaluate(work)
    assert verdict.reward == 0.75
    assert verdict.detail["command"]["reward"] == 1.0
    assert verdict.detail["said"] == {"reward": 0.0, "answer": "yes"}


async def test_a_required_part_that_earns_nothing_takes_it_all(work: AgentWork) -> None:
    assert (await Weighted({"parts": [RIGHT, {**WRONG, "required": True}]}).evaluate(work)).reward == 0.0
    assert (await Weighted({"parts": [WRONG, {**RIGHT, "required": True}]}).evaluate(work)).reward == 0.5


async def test_each_part_has_a_fresh_runtime_and_folders_of_its_own(work: AgentWork) -> None:
    parts = [command("echo first; test ! -e mark && touch mark"), command("echo second; test ! -e mark")]
    verdict = await Weighted({"parts": parts}).evaluate(work)
    assert verdict.reward == 1.0
    assert set(verdict.detail) == {"command", "command 2"}
    said = [(work.logs / f"part-{number}" / "evaluator.log").read_text() for number in range(2)]
    assert said == ["first\n", "second\n"]


async def test_a_part_without_a_reward_leaves_none(work: AgentWork) -> None:
    judge = {"strategy": "judge", "config": {"rubric": "x"}, "name": "taste", "weight": 0.001}
    work.judges = {"default": JudgeSettings(url="http://127.0.0.1:1", model="x")}
    required = {**WRONG, "required": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polar.evaluators.judge._FIRST_RETRY_SECONDS", 0.0)
        verdict = await Weighted({"parts": [required, judge, RIGHT]}).evaluate(work)
    assert (verdict.reward, verdict.reason) == (None, "taste: judge_failed")
    assert verdict.detail["taste"]["reason"] == "judge_failed"


async def test_a_grader_that_fails_is_named(work: AgentWork) -> None:
    parts = [RIGHT, {"strategy": "judge", "config": {"rubric": "x"}, "name": "taste"}]
    with pytest.raises(GraderError, match=r"^taste: .*\[judges\]"):
        await Weighted({"parts": parts}).evaluate(work)


EDITED = Evidence("test_edited", "tests/test_a.py", True)
ASKED = Evidence("grader_path", "/tests")


class Reports:
    """An evaluator with evidence, which then does what it is told to."""

    needs_fresh_runtime: ClassVar[bool] = False
    private_paths = ("/tests",)

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    async def evaluate(self, work: GradingContext) -> Verdict:
        if "error" in self._config:
            raise self._config["error"]
        return Verdict(**self._config)


async def test_evidence_of_every_part_counts(work: AgentWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.evaluators.load", lambda *_: Reports)
    told = {"reward": 1.0, "evidence": [EDITED]}, {"reason": "judge_failed", "evidence": [ASKED]}
    parts = [{"strategy": "reports", "config": config} for config in told]
    evaluator = Weighted({"parts": parts})
    verdict = await evaluator.evaluate(work)
    assert (verdict.reason, verdict.evidence) == ("reports 2: judge_failed", [EDITED, ASKED])
    assert evaluator.private_paths == ["/tests", "/tests"]


async def test_a_part_that_fails_does_not_hide_the_evidence_of_others(
    work: AgentWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.evaluators.load", lambda *_: Reports)
    told = {"reward": 1.0, "evidence": [EDITED]}, {"error": SandboxError("it is gone")}
    with pytest.raises(SandboxError):
        await Weighted({"parts": [{"strategy": "reports", "config": config} for config in told]}).evaluate(work)
    assert work.evidence == [EDITED]


async def test_weighted_parts_may_be_weighted(work: AgentWork) -> None:
    inner = {"strategy": "weighted", "config": {"parts": [RIGHT, WRONG]}, "weight": 2}
    assert (await Weighted({"parts": [inner, WRONG]}).evaluate(work)).reward == pytest.approx(1 / 3)


@pytest.mark.runtimes
async def test_a_part_sees_nothing_of_what_another_leaves(sandbox: WorkFactory, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("echo good > answer.txt; echo 1 > /logs/verifier/reward.txt\n")
    harbor = {"strategy": "harbor", "config": {"tests": str(tests)}}
    answer = {"strategy": "answer", "config": {"file": "answer.txt", "expected": "good"}}
    work = await sandbox.create_work("echo bad > answer.txt")
    verdict = await Weighted({"parts": [harbor, answer, harbor]}).evaluate(work)
    assert [verdict.detail[name]["reward"] for name in ("harbor", "answer", "harbor 2")] == [1.0, 0.0, 1.0]


async def test_a_link_found_by_several_parts_is_listed_once(place: WorkFactory) -> None:
    work = await place.create_work("ln -s .grader/expected out")
    files = [{"type": "upload_file", "target": ".grader/expected", "content": "x"}]
    part = {"strategy": "command", "config": {"command": "cmp out .grader/expected", "files": files}}
    verdict = await Weighted({"parts": [RIGHT, part, {**part, "name": "again"}]}).evaluate(work)
    assert [(one.kind, one.subject, one.proven) for one in verdict.evidence] == [("link_out", "/workspace/out", True)]


def test_it_wants_a_fresh_runtime_where_a_part_does() -> None:
    assert not Weighted({"parts": [RIGHT, {"strategy": "session_completed"}]}).needs_fresh_runtime
    assert Weighted({"parts": [RIGHT, command("true")]}).needs_fresh_runtime
    assert Weighted({"parts": [{"strategy": "test_on_output", "config": {"test_command": "true"}}]}).needs_fresh_runtime


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"config\.parts: it must be given"),
        ({"parts": []}, r"config\.parts\b"),
        ({"parts": [{**RIGHT, "weight": 0}]}, r"config\.parts\.0\.weight"),
        ({"parts": [RIGHT, {"strategy": "none-such"}]}, r"config\.parts\.1: .*none-such"),
        ({"parts": [RIGHT, command("")]}, r"config\.parts\.1: evaluator \(command\): config\.command"),
    ],
)
def test_a_config_that_cant_be_used_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Weighted(config)


class Given:
    """An evaluator whose verdict stands in its config."""

    needs_fresh_runtime = False

    def __init__(self, config: dict[str, Any]) -> None:
        self._verdict = Verdict(**config)

    async def evaluate(self, work: GradingContext) -> Verdict:
        return replace(self._verdict, detail={"session": work.session_id})


numbers = st.floats(allow_nan=False, allow_infinity=False)
turns = st.dictionaries(st.sampled_from(["x1", "x2"]), st.floats(-1e6, 1e6), max_size=2)
given_verdicts = st.one_of(
    st.fixed_dictionaries({"reward": numbers, "turn_rewards": turns}),
    st.fixed_dictionaries({"reason": st.sampled_from(["judge_failed", "other"])}),
)
parts = st.lists(
    st.builds(
        lambda config, weight, required: {
            "strategy": "given",
            "config": config,
            "weight": weight,
            "required": required,
        },
        given_verdicts,
        st.floats(1e-6, 1e6),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(parts=parts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
async def test_a_verdict_is_a_finite_reward_or_a_reason_and_never_both(
    work: AgentWork, monkeypatch: pytest.MonkeyPatch, parts: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr("polar.evaluators.load", lambda _kind, _name: Given)
    verdict = await Weighted({"parts": parts}).evaluate(work)
    assert (verdict.reward is None) != (verdict.reason is None)
    has_reason = any("reason" in part["config"] for part in parts)
    assert (verdict.reason is not None) == has_reason
    json.dumps(verdict.detail)
    if verdict.reward is not None:
        earned = [part["config"]["reward"] for part in parts]
        zeroed = any(part["required"] and part["config"]["reward"] == 0 for part in parts)
        assert math.isfinite(verdict.reward)
        assert verdict.reward == 0 if zeroed else _among(verdict.reward, earned)
        assert set(verdict.turn_rewards) == {turn for part in parts for turn in part["config"]["turn_rewards"]}


def _among(mean: float, earned: list[float]) -> bool:
    room = 1e-9 * max(map(abs, earned))
    return min(earned) - room <= mean <= max(earned) + room


async def test_the_mean_of_the_largest_rewards_is_finite(work: AgentWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.evaluators.load", lambda _kind, _name: Given)
    largest = sys.float_info.max
    config = {"reward": largest, "turn_rewards": {"x1": largest}}
    parts = [{"strategy": "given", "config": config, "weight": weight} for weight in (0.1, 0.2, 0.7, 0.7, 1 / 3)]
    verdict = await Weighted({"parts": parts}).evaluate(work)
    assert verdict.reward == largest
    assert verdict.turn_rewards == {"x1": largest}

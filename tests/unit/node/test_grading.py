"""What evidence of tampering costs a session, and how much of it is kept."""

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.node.grading import MAX_EVIDENCE, apply_policy, bound_evidence
from polar.records.session import PLATFORM_REASONS, Evidence, EvidenceKind, Verdict, is_suspicious
from polar.records.task import OnTampering

PROVEN = Evidence("test_edited", "tests/test_a.py", True)
UNPROVEN = Evidence("grader_path", "/tests")
POLICIES: tuple[OnTampering, ...] = get_args(OnTampering)
KINDS: tuple[EvidenceKind, ...] = get_args(EvidenceKind)

rewards = st.floats(allow_nan=False, allow_infinity=False)
kinds = st.sampled_from(KINDS)
verdicts = st.builds(
    Verdict,
    reward=rewards,
    turn_rewards=st.dictionaries(st.sampled_from("abc"), rewards),
    detail=st.dictionaries(st.sampled_from(("why", "tests")), st.text()),
) | st.builds(Verdict, reason=st.sampled_from(("sandbox_failed", "grader_failed", "timeout")) | st.none())


def earned(verdict: Verdict) -> tuple[float | None, str | None, dict[str, float]]:
    return verdict.reward, verdict.reason, verdict.turn_rewards


@pytest.mark.parametrize(
    ("given_by_evaluator", "zero", "exclude"),
    [
        (Verdict(1.0), (0.0, None, {}), (None, "suspicious", {})),
        (Verdict(0.0), (0.0, None, {}), (None, "suspicious", {})),
        (Verdict(-1.0), (-1.0, None, {}), (None, "suspicious", {})),  # tampering raises no reward
        (
            Verdict(0.5, turn_rewards={"a": 2.0, "b": -1.0}),
            (0.0, None, {"a": 0.0, "b": -1.0}),
            (None, "suspicious", {}),
        ),
        (Verdict(reason="sandbox_failed"), (0.0, None, {}), (None, "suspicious", {})),  # nor is it an excuse
        (Verdict(reason="grader_failed"), (0.0, None, {}), (None, "suspicious", {})),
        (Verdict(reason="judge_failed"), (0.0, None, {}), (None, "suspicious", {})),
        (Verdict(), (0.0, None, {}), (None, "suspicious", {})),
    ],
)
def test_proven_evidence(given_by_evaluator: Verdict, zero: tuple[Any, ...], exclude: tuple[Any, ...]) -> None:
    for found in ([PROVEN], [UNPROVEN, PROVEN]):
        verdict = msgspec.structs.replace(given_by_evaluator, evidence=found)
        assert earned(apply_policy(verdict, "zero")) == zero
        assert earned(apply_policy(verdict, "exclude")) == exclude
        assert apply_policy(verdict, "keep") == verdict
        assert all(apply_policy(verdict, policy).evidence == found for policy in POLICIES)


def test_no_other_try_can_be_had_by_tampering() -> None:
    for reason in PLATFORM_REASONS:
        for policy in ("zero", "exclude"):
            verdict = apply_policy(Verdict(reason=reason, evidence=[PROVEN]), policy)
            assert verdict.reason not in PLATFORM_REASONS


def test_the_detail_says_what_was_given_and_why_it_is_not() -> None:
    verdict = Verdict(0.75, detail={"why": "3 of 4 tests pass", "failed": ["d"]}, evidence=[PROVEN, PROVEN])
    assert apply_policy(verdict, "zero").detail == {
        "failed": ["d"],
        "why": "The agent tampered with its grading: test_edited tests/test_a.py and 1 more.",
        "unadjusted_why": "3 of 4 tests pass",
        "unadjusted_reward": 0.75,
    }
    failed = apply_policy(Verdict(reason="sandbox_failed", evidence=[PROVEN]), "zero")
    assert failed.detail["unadjusted_reason"] == "sandbox_failed"


@settings(deadline=None)
@given(verdicts, st.sampled_from(POLICIES), st.lists(st.builds(Evidence, kinds, st.text(), st.just(False))))
def test_unproven_evidence_never_changes_a_reward(verdict: Verdict, policy: OnTampering, found: list[Evidence]) -> None:
    verdict = msgspec.structs.replace(verdict, evidence=bound_evidence(found))
    assert apply_policy(verdict, policy) == verdict


@settings(deadline=None)
@given(verdicts, st.lists(st.builds(Evidence, kinds, st.text(), st.booleans())))
def test_proven_evidence_never_raises_a_reward(verdict: Verdict, found: list[Evidence]) -> None:
    settled = apply_policy(msgspec.structs.replace(verdict, evidence=bound_evidence(found)), "zero")
    if is_suspicious(found):
        assert settled.reward is not None
        assert settled.reward <= min(0.0, math.inf if verdict.reward is None else verdict.reward)
        assert all(settled.turn_rewards[turn] <= min(0.0, one) for turn, one in verdict.turn_rewards.items())


# Bounds


names = st.text(st.characters(codec=None, exclude_categories=()), max_size=400)  # lone surrogates as well


@settings(deadline=None)
@given(st.lists(st.builds(Evidence, kinds, names, st.booleans(), names), max_size=200))
def test_whatever_is_found_can_be_kept_and_counted(found: list[Evidence]) -> None:
    kept = bound_evidence(found)
    assert len(kept) <= MAX_EVIDENCE + 2 * len(KINDS)
    assert all(len(one.subject) <= 200 and len(one.detail) <= 300 for one in kept)
    assert sum(one.count for one in kept) == len(set(found))
    assert is_suspicious(kept) == is_suspicious(found)
    assert msgspec.json.decode(msgspec.json.encode(kept), type=list[Evidence]) == kept


def test_proven_evidence_is_not_crowded_out() -> None:
    many = [Evidence("grader_path", f"/tests/{number}") for number in range(1000)]
    kept = bound_evidence([*many, PROVEN])
    assert kept[0] == PROVEN
    assert kept[-1] == Evidence("grader_path", "(others)", False, count=1001 - MAX_EVIDENCE)


def test_names_that_are_no_text_are_readable_and_short() -> None:
    name = b"/tests/\xff\n".decode(errors="surrogateescape") + "x" * 1000 + "/expected.txt"
    (kept,) = bound_evidence([Evidence("link_out", name)])
    assert kept.subject.startswith("/tests/\\udcff")
    assert kept.subject.endswith("/expected.txt")
    assert len(kept.subject) == 200


def test_an_unknown_kind_is_not_recorded_since_it_could_not_be_read_again() -> None:
    magic: Any = "magic"
    assert bound_evidence([Evidence(magic, "x", True), PROVEN]) == [PROVEN]

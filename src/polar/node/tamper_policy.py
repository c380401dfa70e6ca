"""Evidence that an agent tampered with its grading: kept within bounds, and what it costs the session.

Evidence comes from the evaluator and from the session itself (probes.py). Unproven evidence is recorded and changes
nothing. With proven evidence, the task's `suspicious` setting decides:

    zero      The reward is 0, or what the evaluator said where that is less. A session without a reward gets 0 as well,
              whatever the reason: tampering must not buy an excuse or another try, and since the reward would be 0
              anyway, a platform failure that hid it from us changes nothing.
    exclude   There is no reward; the reason is `suspicious`, also in place of a platform failure, which would be
              tried again.
    keep      What the evaluator said.

A cancelled session stays cancelled: nobody judged it. `Verdict.detail` says what the evaluator had given.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from polar.node.finished_session import to_printable
from polar.records.session import Evidence, EvidenceKind, Verdict, is_suspicious
from polar.records.task import OnTampering

log = logging.getLogger(__name__)

SUSPICIOUS_REASON = "suspicious"
"""The reason of sessions that `exclude` leaves without a reward."""

MAX_EVIDENCE = 50
"""Entries of a session. What is beyond is counted in further ones, at most one for each kind."""

_MAX_SUBJECT = 200  # characters
_MAX_DETAIL = 300
_KINDS = frozenset(get_args(EvidenceKind))
_OTHERS = "(others)"


def bound_evidence(evidence: Iterable[Evidence]) -> list[Evidence]:
    """Proven evidence first, without duplicates, as text that can be stored: subjects are names that an agent chose."""
    known = []
    for one in dict.fromkeys(evidence):
        if one.kind in _KINDS:
            known.append(_shorten_evidence(one))
        else:  # could not be read from the store again
            log.error("Evidence of the unknown kind %r is not recorded.", one.kind)
    known.sort(key=lambda one: not one.proven)
    rest: Counter[tuple[EvidenceKind, bool]] = Counter()
    for one in known[MAX_EVIDENCE:]:
        rest[one.kind, one.proven] += one.count
    return known[:MAX_EVIDENCE] + [Evidence(kind, _OTHERS, proven, count=n) for (kind, proven), n in rest.items()]


def apply_policy(verdict: Verdict, policy: OnTampering) -> Verdict:
    """What the session earns, given its evidence."""
    if policy == "keep" or not is_suspicious(verdict.evidence):
        return verdict
    if policy == "exclude":
        return Verdict(reason=SUSPICIOUS_REASON, detail=_explain(verdict), evidence=verdict.evidence)
    reward = 0.0 if verdict.reward is None else min(0.0, verdict.reward)
    turns = {turn: min(0.0, earned) for turn, earned in verdict.turn_rewards.items()}
    if reward == verdict.reward and turns == verdict.turn_rewards:
        return verdict
    return Verdict(reward, turn_rewards=turns, detail=_explain(verdict), evidence=verdict.evidence)


def _explain(verdict: Verdict) -> dict[str, Any]:
    proven = [one for one in verdict.evidence if one.proven]
    more = f" and {len(proven) - 1} more" if len(proven) > 1 else ""
    said = {"unadjusted_why": verdict.detail["why"]} if "why" in verdict.detail else {}
    name = "reward" if verdict.reason is None else "reason"
    earned = {f"unadjusted_{name}": getattr(verdict, name)}
    why = f"The agent tampered with its grading: {proven[0].kind} {proven[0].subject}{more}."
    return {**verdict.detail, **said, **earned, "why": why}


def _shorten_evidence(evidence: Evidence) -> Evidence:
    subject, detail = _shorten(evidence.subject, _MAX_SUBJECT), _shorten(evidence.detail, _MAX_DETAIL)
    return msgspec.structs.replace(evidence, subject=subject, detail=detail, count=max(1, evidence.count))


def _shorten(text: str, max_chars: int) -> str:
    """The beginning and the end: of a path, both say something."""
    text = to_printable(str(text))
    return text if len(text) <= max_chars else f"{text[: max_chars // 2]}…{text[-(max_chars // 2 - 1) :]}"

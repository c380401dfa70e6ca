"""What an evaluator is given of a session (evaluators.base.Work), and what proven tampering costs.

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
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from polar.config import JudgeSettings
from polar.evaluators.base import Outcome
from polar.node.finished_session import to_printable
from polar.node.runtime_pool import WarmPool
from polar.node.task_plan import TaskPlan
from polar.records.exchange import Exchange
from polar.records.session import Evidence, EvidenceKind, Session, Verdict, is_suspicious
from polar.records.task import OnTampering, TaskRequest
from polar.runtimes.base import CommandResult, Runtime
from polar.trajectory.conversations import read_call
from polar.trajectory.session import assign_session_roles
from polar.types import Text

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
    for item in dict.fromkeys(evidence):
        if item.kind in _KINDS:
            known.append(_shorten_evidence(item))
        else:  # could not be read from the store again
            log.error("Evidence of the unknown kind %r is not recorded.", item.kind)
    known.sort(key=lambda item: not item.proven)
    omitted: Counter[tuple[EvidenceKind, bool]] = Counter()
    for item in known[MAX_EVIDENCE:]:
        omitted[item.kind, item.proven] += item.count
    return known[:MAX_EVIDENCE] + [Evidence(kind, _OTHERS, proven, count=n) for (kind, proven), n in omitted.items()]


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
    proven = [item for item in verdict.evidence if item.proven]
    others = f" and {len(proven) - 1} more" if len(proven) > 1 else ""
    earlier_reason = {"unadjusted_why": verdict.detail["why"]} if "why" in verdict.detail else {}
    name = "reward" if verdict.reason is None else "reason"
    earned = {f"unadjusted_{name}": getattr(verdict, name)}
    why = f"The agent tampered with its grading: {proven[0].kind} {proven[0].subject}{others}."
    return {**verdict.detail, **earlier_reason, **earned, "why": why}


def _shorten_evidence(evidence: Evidence) -> Evidence:
    subject, detail = _shorten(evidence.subject, _MAX_SUBJECT), _shorten(evidence.detail, _MAX_DETAIL)
    return msgspec.structs.replace(evidence, subject=subject, detail=detail, count=max(1, evidence.count))


def _shorten(text: str, max_chars: int) -> str:
    """The beginning and the end: of a path, both say something."""
    text = to_printable(str(text))
    return text if len(text) <= max_chars else f"{text[: max_chars // 2]}…{text[-(max_chars // 2 - 1) :]}"


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
        self.answer = find_last_answer(calls)
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


def find_last_answer(calls: list[Exchange]) -> str:
    """The last text that the agent said."""
    for exchange in reversed(calls):
        if exchange.reply is not None:
            text = "".join(part.text for part in exchange.reply.parts if isinstance(part, Text))
            if text.strip():
                return text
    return ""

"""What became of sessions: counted as they end, for each task and for all."""

from collections import Counter

from msgspec import Struct, field

from polar.cli.show_tokens import escape_controls
from polar.node.finished_session import FinishedSession
from polar.records.session import Verdict, is_suspicious
from polar.records.task import MASKED_REASONS

STAGES = ("init", "ready", "run", "postrun")
_MAX_EXPLANATION_CHARS = 120  # characters


class Failure(Struct, frozen=True):
    """The first session that has no reward for some reason."""

    session_id: str
    error: str | None


class RunTally(Struct):
    sessions: int = 0
    last_session_id: str = ""  # the session that ended last
    rewarded: int = 0
    reward_sum: float = 0.0  # the sum
    solved: int = 0  # with a reward of 1 or more
    reasons: Counter[str] = field(default_factory=Counter)
    first_failures: dict[str, Failure] = field(default_factory=dict)  # by reason
    suspicious: int = 0  # with proven evidence of tampering
    evidence_kinds: Counter[str] = field(default_factory=Counter)  # proven, by kind
    suspected: int = 0  # with unproven evidence alone
    zero_reward_reasons: Counter[str] = field(
        default_factory=Counter
    )  # rewards of 0, by why, where the evaluator says so
    exited_cleanly: int = 0  # harnesses that ended by themselves, with 0
    turns: int = 0
    tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # by stage

    def add(self, finished: FinishedSession) -> None:
        verdict = finished.verdict
        self.sessions += 1
        self.last_session_id = finished.session_id
        self.turns += finished.turns
        self.tokens += finished.tokens
        self.seconds.update(finished.seconds)
        outcome = finished.outcome
        self.exited_cleanly += outcome is not None and outcome.end_reason == "finished" and outcome.exit_code == 0
        self.suspicious += is_suspicious(verdict.evidence)
        self.suspected += bool(verdict.evidence) and not is_suspicious(verdict.evidence)
        self.evidence_kinds.update({one.kind for one in verdict.evidence if one.proven})
        if verdict.reward is not None:
            self.rewarded += 1
            self.reward_sum += verdict.reward
            self.solved += verdict.reward >= 1
            if verdict.reward == 0 and (said := explain_reward(verdict)):
                self.zero_reward_reasons[said] += 1
        elif verdict.reason is not None:
            self.reasons[verdict.reason] += 1
            self.first_failures.setdefault(verdict.reason, Failure(finished.session_id, finished.error))

    @property
    def mean_reward(self) -> float | None:
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def platform_failures(self) -> Counter[str]:
        """Reasons that are neither the agent's nor the task's."""
        return Counter({reason: count for reason, count in self.reasons.items() if reason not in MASKED_REASONS})


def explain_reward(verdict: Verdict) -> str:
    """What an evaluator says of its reward, in a short line; empty where it says nothing. It may quote the agent."""
    said = verdict.detail.get("why")
    if not isinstance(said, str):
        return ""
    flat = escape_controls(" ".join(said.split()))
    return flat if len(flat) <= _MAX_EXPLANATION_CHARS else f"{flat[: _MAX_EXPLANATION_CHARS - 1]}…"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())

"""What became of sessions: counted as they end, for each task and for all."""

from collections import Counter

from msgspec import Struct, field

from polar.cli.show_tokens import visible
from polar.node.finished import Finished
from polar.rollout.semantics import MASKED
from polar.store.base import Verdict, is_suspicious

STAGES = ("init", "ready", "run", "postrun")
_SAID = 120  # characters


class Failure(Struct, frozen=True):
    """The first session that has no reward for some reason."""

    session_id: str
    error: str | None


class Tally(Struct):
    sessions: int = 0
    last: str = ""  # the session that ended last
    rewarded: int = 0
    reward: float = 0.0  # the sum
    solved: int = 0  # with a reward of 1 or more
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, Failure] = field(default_factory=dict)  # by reason
    suspicious: int = 0  # with proven evidence of tampering
    evidence: Counter[str] = field(default_factory=Counter)  # proven, by kind
    suspected: int = 0  # with unproven evidence alone
    zeros: Counter[str] = field(default_factory=Counter)  # rewards of 0, by why, where the evaluator says so
    ended_well: int = 0  # harnesses that ended by themselves, with 0
    turns: int = 0
    tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # by stage

    def add(self, finished: Finished) -> None:
        verdict = finished.verdict
        self.sessions += 1
        self.last = finished.session_id
        self.turns += finished.turns
        self.tokens += finished.tokens
        self.seconds.update(finished.seconds)
        outcome = finished.outcome
        self.ended_well += outcome is not None and outcome.ended == "finished" and outcome.exit_code == 0
        self.suspicious += is_suspicious(verdict.evidence)
        self.suspected += bool(verdict.evidence) and not is_suspicious(verdict.evidence)
        self.evidence.update({one.kind for one in verdict.evidence if one.proven})
        if verdict.reward is not None:
            self.rewarded += 1
            self.reward += verdict.reward
            self.solved += verdict.reward >= 1
            if verdict.reward == 0 and (said := why(verdict)):
                self.zeros[said] += 1
        elif verdict.reason is not None:
            self.reasons[verdict.reason] += 1
            self.first.setdefault(verdict.reason, Failure(finished.session_id, finished.error))

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.rewarded if self.rewarded else None

    @property
    def failures(self) -> Counter[str]:
        """Reasons that are neither the agent's nor the task's."""
        return Counter({reason: count for reason, count in self.reasons.items() if reason not in MASKED})


def why(verdict: Verdict) -> str:
    """What an evaluator says of its reward, in a short line; empty where it says nothing. It may quote the agent."""
    said = verdict.detail.get("why")
    if not isinstance(said, str):
        return ""
    flat = visible(" ".join(said.split()))
    return flat if len(flat) <= _SAID else f"{flat[: _SAID - 1]}…"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())

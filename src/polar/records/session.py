"""A session: one run of a harness, and the verdict on it."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from polar.errors import PolarError
from polar.records.exchange import Exchange

NOT_RUNNABLE = "not_runnable"
"""The node can't run the task: it has not the harness, say, or not the image. Others may."""

PLATFORM_REASONS = frozenset({"sandbox_failed", "store_failed", "engine_failed", "node_failed", NOT_RUNNABLE})
"""Reasons for which a session is tried again: they say nothing of the agent."""

HoldReason = Literal["verify_failed", "verify_error"]
"""Why a session is held back: it failed the check, or the check itself failed."""
HOLD_REASONS: frozenset[str] = frozenset(("verify_failed", "verify_error"))

EvidenceKind = Literal[
    "test_edited",  # a protected test, or a file that configures tests, was changed, added or deleted
    "link_out",  # a link of the agent's leads to something that was not carried with it
    "grader_path",  # files were left where the grader's own stand, or the agent looked for them
    "grader_environment",  # something that the grader loads, reads or runs by itself was changed
    "canary_passed",  # a test that must fail passed
    "results_forged",  # results that the grader's own process did not write
    "grader_disrupted",  # the grader was stopped, starved or kept from its work
]


class Evidence(Struct, frozen=True):
    """One observation that an agent interfered with its grading.

    `proven` says that honest work can't explain it. The task's `suspicious` setting decides what becomes of a session
    with proven evidence; all other evidence is only recorded."""

    kind: EvidenceKind
    subject: str  # the path, test or program that it is about
    proven: bool = False
    detail: str = ""
    count: Annotated[int, Meta(ge=1)] = 1  # observations that this entry stands for


def is_suspicious(evidence: Iterable[Evidence]) -> bool:
    """Whether any of it is proven."""
    return any(one.proven for one in evidence)


class Verdict(Struct, frozen=True):
    """What a session earned: a reward, or the reason why there is none; and perhaps rewards of single turns."""

    reward: float | None = None
    reason: str | None = None
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by exchange id
    detail: dict[str, Any] = field(default_factory=dict)  # for people; kept beside the session, not in the store
    evidence: list[Evidence] = field(default_factory=list)  # of tampering


class SessionSummary(Struct):
    """A session without its calls: what a stored session and a received result both say, and exporters write."""

    session_id: str
    created_at: float
    run: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)
    ended_at: float | None = None
    reward: float | None = None
    reason: str | None = None  # why there is no reward, where somebody said so
    suspicious: bool = False  # its agent is proven to have tampered with its grading
    evidence: list[Evidence] = field(default_factory=list)  # of that

    @property
    def group_id(self) -> str:
        """The task that it is a sample of. Without one, a session is a group of its own."""
        named = (self.metadata.get(key) for key in ("task_id", "group"))
        return str(next((name for name in named if name is not None), self.session_id))


class Session(Struct):
    """One harness run. The key itself is never stored, only its SHA-256."""

    session_id: str
    key_hash: bytes
    created_at: float
    run: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Literal["open", "ended"] = "open"
    ended_at: float | None = None
    reward: float | None = None
    reason: str | None = None  # why there is no reward, where somebody said so
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by exchange id
    evidence: list[Evidence] = field(default_factory=list)  # of tampering with its grading

    @property
    def suspicious(self) -> bool:
        return is_suspicious(self.evidence)

    @property
    def summary(self) -> SessionSummary:
        return SessionSummary(
            self.session_id,
            self.created_at,
            self.run,
            self.metadata,
            self.ended_at,
            self.reward,
            self.reason,
            self.suspicious,
            self.evidence,
        )


class SessionRecord(Struct):
    """A session, whole."""

    session: Session | None = None  # None: there is no such session
    exchanges: list[Exchange] = []
    damage: str | None = None  # why it can't be read


class HeldBackError(PolarError):
    """A session that must not be handed on. `kind` is that of the first problem, for machines."""

    def __init__(self, session_id: str, reason: HoldReason, kind: str, message: str) -> None:
        super().__init__(message)
        self.session_id = session_id
        self.reason: HoldReason = reason
        self.kind = kind

"""What comes back: the results of sessions and tasks, as trainers receive them.

The fields are those that bridges for NVIDIA's Polar read; ours are added.
"""

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from polar.config import DEFAULT_RUN
from polar.records.spans import ExchangeRole, ExcludedSpan, Span, TokenCounts

SessionStatus = Literal["COMPLETED", "ERROR", "TIMEOUT"]

TaskState = Literal["running", "completed", "failed"]

ResultUnit = Literal["session", "group"]
"""What results are read by: sessions, or tasks with all of their sessions."""

SuspiciousFilter = Literal["keep", "only", "exclude"]
"""Of results: all of them, only sessions with proven evidence of tampering, or all but those."""

PauseMode = Literal["freeze", "hold", "drain", "sleep"]
"""What becomes of calls that run when generation is paused."""


class ResultModel(BaseModel):
    """A part of a result. Fields that only a newer server knows are kept as they come."""

    model_config = ConfigDict(extra="allow")


class EvidenceResult(ResultModel):
    """An observation that the agent interfered with its grading (records.session.Evidence)."""

    kind: str
    subject: str = Field(description="the path, test or program that it is about")
    proven: bool = Field(False, description="honest work can't explain it")
    detail: str = ""
    count: int = Field(1, description="observations that this entry stands for")


class TraceResult(ResultModel):
    """A sequence of tokens to train on (records.trajectory.Trace). Lists of the response are aligned with
    `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int] = Field(description="1 where a token trains")
    response_logprobs: list[float] | None = Field(None, description="null where the trainer recomputes them")
    prompt_messages: list[dict[str, Any]] = Field([], description="empty where a bare prompt was sampled from")
    response_messages: list[dict[str, Any]] = []
    tools: list[Any] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    reason: str | None = Field(None, description="why there is no reward")
    weight: float = Field(0.0, description="its trainable tokens / the session's")
    policy_versions: list[int] = Field([], description="-1 for tokens that nobody sampled")
    exchange_ids: list[str] = Field([], description="whose sampled tokens train here, in order")
    role: ExchangeRole = "main"
    agent_id: str | None = None
    branch_reason: str | None = Field(None, description="of the exchange that it begins with")
    temperature: float | None = Field(None, description="null where its exchanges differ in it")
    routed_experts: str | None = Field(None, description="of all tokens but the last: a .npy file in base64")
    metadata: dict[str, Any] = {}

    @model_serializer(mode="wrap")
    def _leave_out_missing_experts(self, serialize: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """As the server sends a trace without them. A return type here would take the fields out of the JSON schema."""
        document: dict[str, Any] = serialize(self)
        if self.routed_experts is None:
            document.pop("routed_experts", None)
        return document

    @property
    def spans(self) -> list[Span]:
        """Where in the response each exchange's sampled tokens stand."""
        return msgspec.convert(self.metadata.get("spans", []), list[Span])

    @property
    def turn_rewards(self) -> dict[str, float]:
        """Rewards of single turns, by exchange id."""
        return msgspec.convert(self.metadata.get("turn_rewards", {}), dict[str, float])

    @property
    def scales(self) -> dict[str, float]:
        """What divides the logits whose log-probabilities these are, by exchange id; only where it is known."""
        return msgspec.convert(self.metadata.get("scales", {}), dict[str, float])


class TrajectoryResult(ResultModel):
    status: SessionStatus
    traces: list[TraceResult] = []
    metadata: dict[str, Any] = {}
    error: str | None = None

    @property
    def excluded(self) -> list[ExcludedSpan]:
        """Sampled tokens that are in no trace, and why."""
        return msgspec.convert(self.metadata.get("excluded", []), list[ExcludedSpan])

    @property
    def tokens(self) -> TokenCounts:
        return msgspec.convert(self.metadata.get("tokens", _NO_TOKENS), TokenCounts)

    @property
    def builder(self) -> str:
        """Which builder made the traces."""
        return str(self.metadata.get("builder", ""))


_NO_TOKENS = {"computed": 0, "unique": 0, "trainable": 0}


class SessionTiming(BaseModel):
    """Milliseconds in each stage. Bridges forbid other fields here, so ours are in the result's `metadata.timing`."""

    model_config = ConfigDict(extra="forbid")

    register_to_init_queue_ms: float = Field(0.0, description="waiting for INIT")
    init_ms: float = 0.0
    run_ms: float = 0.0
    postrun_ms: float = 0.0


class SessionResult(ResultModel):
    """What came of one session of a task: its reward, or the reason why there is none, and what can be trained on."""

    session_id: str
    task_id: str
    status: SessionStatus
    reward: float | None = None
    reason: str | None = None  # why there is no reward
    trajectory: TrajectoryResult
    timing: SessionTiming = SessionTiming()
    node_id: str | None = None
    error: str | None = None
    evidence: list[EvidenceResult] = Field([], description="of tampering; metadata.suspicious: some of it is proven")
    metadata: dict[str, Any] = {}

    @property
    def suspicious(self) -> bool:
        """Whether its agent is proven to have tampered with its grading."""
        return bool(self.metadata.get("suspicious"))

    @property
    def stale(self) -> bool:
        """Whether it was sampled from an older policy than its task takes."""
        return bool(self.metadata.get("stale"))


class TaskSession(ResultModel):
    """Where one session of a task is by now."""

    sample: int
    state: Literal["queued", "leased", "waiting", "done"] = Field(description="waiting: for another try")
    attempt: int = Field(0, description="tries that the platform failed")
    node: str | None = Field(None, description="that has it, or had it last")
    id: str | None = Field(None, description="of the session that it ended with")


class TaskStatus(ResultModel):
    """Where a task is by now, with the results of its sessions once they have ended."""

    task_id: str
    run: str = DEFAULT_RUN
    status: TaskState
    total_sessions: int = 0
    completed_sessions: int = Field(0, description="that have ended, with a reward or without")
    usable_sessions: int = Field(0, description="that have ended with a reward")
    cancelled: str | None = Field(None, description="why it is ended early: cancelled, early_stop")
    cancelled_sessions: int | None = Field(None, description="that this call ends, now or soon; DELETE alone tells it")
    created_at: float | None = Field(None, description="seconds since 1970")
    ended_at: float | None = None
    cursor: int | None = Field(None, description="of its end, among groups")
    sessions: list[TaskSession] = Field([], description="the first 1000")
    results: list[SessionResult] = Field([], description="of the sessions that have ended by now")
    result_paths: list[str] = Field([], description="always empty: results are not in files")


class TaskResult(TaskStatus):
    """What is posted to `callback_url`."""


class NumberedResult(SessionResult):
    """A session's result, and where it stands in the order in which they ended."""

    cursor: int
    sample: int


class GroupResult(ResultModel):
    """All sessions of a task that has ended."""

    task_id: str
    run: str = DEFAULT_RUN
    status: TaskState
    asked: int  # sessions
    usable: int  # those with a reward
    cancelled: int
    cursor: int
    results: list[SessionResult] = []

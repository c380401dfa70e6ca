"""What comes back: the results of sessions and tasks, as trainers receive them.

The fields are those that bridges for NVIDIA's Polar read; ours are added.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polar.config import DEFAULT_RUN

SessionStatus = Literal["COMPLETED", "ERROR", "TIMEOUT"]

TaskState = Literal["running", "completed", "failed"]

ResultUnit = Literal["session", "group"]
"""What results are read by: sessions, or tasks with all of their sessions."""

SuspiciousFilter = Literal["keep", "only", "exclude"]
"""Of results: all of them, only sessions with proven evidence of tampering, or all but those."""

PauseMode = Literal["freeze", "hold", "drain", "sleep"]
"""What becomes of calls that run when generation is paused."""


class EvidenceResult(BaseModel):
    """An observation that the agent interfered with its grading (records.session.Evidence)."""

    model_config = ConfigDict(extra="allow")

    kind: str
    subject: str = Field(description="the path, test or program that it is about")
    proven: bool = Field(False, description="honest work can't explain it")
    detail: str = ""
    count: int = Field(1, description="observations that this entry stands for")


class TraceResult(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    response_logprobs: list[float] | None = None
    prompt_messages: list[dict[str, Any]] = Field([], description="empty where a bare prompt was sampled from")
    response_messages: list[dict[str, Any]] = []
    tools: list[Any] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}


class TrajectoryResult(BaseModel):
    model_config = ConfigDict(extra="allow")

    status: SessionStatus
    traces: list[TraceResult] = []
    metadata: dict[str, Any] = {}
    error: str | None = None


class SessionTiming(BaseModel):
    """Milliseconds in each stage. Bridges forbid other fields here, so ours are in the result's `metadata.timing`."""

    model_config = ConfigDict(extra="forbid")

    register_to_init_queue_ms: float = Field(0.0, description="waiting for INIT")
    init_ms: float = 0.0
    run_ms: float = 0.0
    postrun_ms: float = 0.0


class SessionResult(BaseModel):
    model_config = ConfigDict(extra="allow")

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


class TaskSession(BaseModel):
    """Where one session of a task is by now."""

    model_config = ConfigDict(extra="allow")

    sample: int
    state: Literal["queued", "leased", "waiting", "done"] = Field(description="waiting: for another try")
    attempt: int = Field(0, description="tries that the platform failed")
    node: str | None = Field(None, description="that has it, or had it last")
    id: str | None = Field(None, description="of the session that it ended with")


class TaskStatus(BaseModel):
    model_config = ConfigDict(extra="allow")

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


class GroupResult(BaseModel):
    """All sessions of a task that has ended."""

    model_config = ConfigDict(extra="allow")

    task_id: str
    run: str = DEFAULT_RUN
    status: TaskState
    asked: int  # sessions
    usable: int  # those with a reward
    cancelled: int
    cursor: int
    results: list[SessionResult] = []

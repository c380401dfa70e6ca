"""The task API of NVIDIA's Polar as bridges parse it: what its models require, and what they forbid.

Written from the facts of its public sources (063c948), not from our own models: an answer that ours take but these
refuse is one that a bridge throws away, together with the whole group.
"""

import math
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class SessionStatus(StrEnum):
    REGISTERED = "REGISTERED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    RUNNING = "RUNNING"
    POST_RUN = "POST_RUN"
    BUILDING = "BUILDING"
    EVALUATING = "EVALUATING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"


class SessionTiming(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the one model that refuses what it doesn't know

    register_to_init_queue_ms: float = 0.0
    init_ms: float = 0.0
    run_ms: float = 0.0
    postrun_ms: float = 0.0


class Trace(BaseModel):
    prompt_ids: list[int] = Field(default_factory=list)
    response_ids: list[int] = Field(default_factory=list)
    loss_mask: list[int] = Field(default_factory=list)
    prompt_messages: list[dict[str, Any]] = Field(default_factory=list)
    response_messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    response_logprobs: list[float] | None = None
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _aligned(self) -> "Trace":
        if not set(self.loss_mask) <= {0, 1}:
            raise ValueError("a mask is made of 0 and 1")
        if self.loss_mask and len(self.loss_mask) != len(self.response_ids):
            raise ValueError("the mask is not as long as the response")
        if self.response_logprobs is not None and len(self.response_logprobs) != len(self.response_ids):
            raise ValueError("the log-probabilities are not as many as the response's tokens")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("a reward is finite")
        return self


class Trajectory(BaseModel):
    status: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    traces: list[Trace] = Field(default_factory=list)
    error: str | None = None

    @field_validator("status")
    @classmethod
    def _terminal(cls, status: str) -> str:
        if status not in ("COMPLETED", "TIMEOUT", "ERROR"):
            raise ValueError(f"{status} is no status of a trajectory")
        return status


class SessionResult(BaseModel):
    session_id: str
    task_id: str
    status: SessionStatus
    trajectory: Trajectory
    timing: SessionTiming = Field(default_factory=SessionTiming)
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskResult(BaseModel):
    """What is posted to a callback."""

    task_id: str
    status: str
    results: list[SessionResult]
    result_paths: list[str] = Field(default_factory=list)


class TaskStatus(BaseModel):
    """What GET and DELETE answer."""

    task_id: str
    status: str
    total_sessions: int
    completed_sessions: int
    results: list[SessionResult] = Field(default_factory=list)
    result_paths: list[str] = Field(default_factory=list)

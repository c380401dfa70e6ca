"""What a task means where rollout systems differ: one record, chosen when the task is submitted and stored with it.

`[server] compat = "nvidia"` (or a run's own setting) chooses the meaning that tasks have on NVIDIA's Polar, for bridges
that were written for it. It changes what is graded and reported, never how sessions are isolated.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from polar.config import Compat

OnLimit = Literal["grade", "zero", "mask"]
"""What a session that ran into a limit earns: what stands then is evaluated, or nothing (0), or it has no reward."""


MASKED_REASONS = frozenset(("timeout", "length", "nonzero_exit", "timeout_grading", "suspicious"))
"""Reasons of sessions that earn nothing because their task says so: neither the platform nor a grader failed."""


class TaskSemantics(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    on_failed_exit: Literal["grade", "mask"] = Field(
        "grade", description="a harness that exits non-zero: what it left is graded, or it has no reward"
    )
    on_timeout: OnLimit = Field("grade", description="of tasks that don't set their own `on_timeout`")
    on_grader_timeout: Literal["zero", "mask"] = Field(
        "zero", description="a grader that runs out of time: reward 0, or none"
    )
    builder: str = Field("prefix_merging", description="of tasks that name no `builder.strategy`")
    eval_prepare: Literal["add", "replace"] = Field(
        "add", description="the evaluator's runtime: `prepare` and `eval_prepare`, or `eval_prepare` in its place"
    )
    clock: Literal["run", "init"] = Field(
        "run", description="`timeout_seconds` counts the run of the harness; or INIT, the run and the grading"
    )
    mask_traces: bool = Field(False, description="traces of sessions without a reward have masks and rewards of zeros")
    all_failed: Literal["failed", "completed"] = Field("failed", description="status of a task without usable sessions")
    resubmit_ended: Literal["keep", "rerun"] = Field("keep", description="an ended task that is submitted again")


POLAR = TaskSemantics()

NVIDIA = TaskSemantics(
    on_failed_exit="mask",
    on_timeout="mask",
    on_grader_timeout="mask",
    builder="per_request",
    eval_prepare="replace",
    clock="init",
    mask_traces=True,
    all_failed="completed",
    resubmit_ended="rerun",
)

SEMANTICS: dict[Compat, TaskSemantics] = {"polar": POLAR, "nvidia": NVIDIA}

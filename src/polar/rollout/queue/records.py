"""Records of the queue: tasks, the work of their samples, leases and changes.

`TaskRow`, `WorkRow` and `LeaseCandidate` are rows as the queue's SQL selects them. The functions at the end convert
records to parameters, and rows to records.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from polar.records.result import ResultUnit
from polar.rollout.protocol import FinishStatus, Lease, LeaseId, SessionOutcome

WorkState = Literal["queued", "leased", "waiting", "done"]


class TaskRow(Struct):
    run: str
    task_id: str
    state: Literal["running", "completed", "failed"]
    cancelled: str | None  # why no more of its sessions begin
    samples: int
    ended: int
    usable: int
    enough: int | None
    created_at: float
    ended_at: float | None
    cursor: int | None
    callback: Literal["waiting", "acknowledged", "given_up"] | None
    digest: bytes
    request: str  # JSON


class WorkRow(Struct):
    work_id: int
    run: str
    task_id: str
    sample: int
    state: WorkState
    fence: int
    attempt: int
    kills: int
    node: str | None
    version: int | None  # of the policy, when it was leased
    cursor: int | None
    session_id: str | None
    summary: str | None  # a SessionOutcome, as JSON


class NewTask(Struct):
    run: str
    task_id: str
    samples: int
    enough: int | None
    lane: str
    priority: int
    callback_url: str | None
    digest: bytes  # of the request without callback_url
    request: str
    rerun: bool = False  # an ended task with this id is run again


class AdmittedTask(Struct):
    """The result of submitting a NewTask."""

    row: TaskRow  # as it is in the queue now; it may have other content
    is_new: bool = True
    replaced: TaskRow | None = None  # the ended task with this id that it replaces
    has_new_callback: bool = False  # the task existed, and gets another callback URL


class Lane(Struct, frozen=True):
    """Work of one run for one runtime backend. Priorities are compared within a lane."""

    run: str
    name: str


class LeaseAllowance(Struct, frozen=True):
    """What a node may lease from a lane."""

    lane: Lane
    max_sessions: int  # of the run, shared by its lanes
    running: int  # of the run, by now: of equally urgent work, that of the least busy run goes first
    version: int | None  # of the policy
    is_isolation_node: bool = (
        False  # the node gets nothing that is less urgent than work that is to run alone, until it is idle
    )


class LeaseCandidate(Struct):
    """The next work of a lane."""

    work_id: int
    rank: int
    kills: int
    fence: int
    task_id: str
    sample: int
    attempt: int
    digest: bytes
    request: str


class TrackedLease(Struct):
    """A lease, as the server keeps it in memory."""

    lease_id: LeaseId
    lane: Lane
    task_id: str
    node: str
    version: int | None
    cancelled: str | None
    request: str


class EndedTask(Struct):
    run: str
    task_id: str
    state: str
    cursor: int
    has_callback: bool


class FinishResult(Struct):
    """The answer to an outcome."""

    status: FinishStatus
    change: "WorkChange | None" = None  # None for a repeated or late outcome


class WorkChange(Struct):
    """A change of the state of some work."""

    lane: Lane
    task_id: str
    sample: int
    old_state: WorkState
    new_state: WorkState
    outcome: SessionOutcome
    cursor: int | None = None
    ended_task: EndedTask | None = None  # the task, if this was its last session
    triggers_early_stop: bool = False  # its task has enough graded sessions now
    cancelled_work: list["WorkChange"] = []  # work of the task that the early stop cancelled before it began


class ConsumerPosition(Struct, frozen=True):
    """The cursor up to which a consumer has taken all results."""

    cursor: int
    unit: ResultUnit


class Counts(Struct):
    queued: int = 0
    leased: int = 0
    waiting: int = 0


class Totals(Struct):
    tasks: int = 0
    ended: int = 0
    usable: int = 0


# Parameters and rows


def make_work_parameters(task: NewTask, first: int) -> list[dict[str, object]]:
    return [
        {
            "work_id": first + sample,
            "run": task.run,
            "task_id": task.task_id,
            "sample": sample,
            "lane": task.lane,
            "rank": -task.priority,
        }
        for sample in range(task.samples)
    ]


def make_task_parameters(task: NewTask, now: float) -> dict[str, object]:
    return {
        "run": task.run,
        "task_id": task.task_id,
        "samples": task.samples,
        "enough": task.enough,
        "created_at": now,
        "callback": None if task.callback_url is None else "waiting",
        "digest": task.digest,
        "request": task.request,
    }


def make_task_row(task: NewTask, now: float) -> TaskRow:
    """The row of a task that was just inserted."""
    return TaskRow(
        run=task.run,
        task_id=task.task_id,
        state="running",
        cancelled=None,
        samples=task.samples,
        ended=0,
        usable=0,
        enough=task.enough,
        created_at=now,
        ended_at=None,
        cursor=None,
        callback=None if task.callback_url is None else "waiting",
        digest=task.digest,
        request=task.request,
    )


class _Request(Struct):
    """The fields of a TaskRequest that are needed here."""

    callback_url: str | None = None


_decode_request = msgspec.json.Decoder(_Request).decode


def parse_callback_url(request: str) -> str | None:
    """`request` is a TaskRequest, as JSON."""
    return _decode_request(request).callback_url


def make_end_parameters(outcome: SessionOutcome, state: WorkState, cursor: int) -> dict[str, object]:
    return {
        "work_id": outcome.work_id,
        "fence": outcome.fence,
        "state": state,
        "session_id": outcome.session_id,
        "usable": int(outcome.reason is None),
        "summary": msgspec.json.encode(outcome).decode(),
        "cursor": cursor,
    }


def make_lease(candidate: LeaseCandidate, allowance: LeaseAllowance, node: str) -> tuple[Lease, TrackedLease]:
    lane, fence = allowance.lane, candidate.fence + 1
    lease = Lease(
        work_id=candidate.work_id,
        fence=fence,
        run=lane.run,
        task_id=candidate.task_id,
        sample=candidate.sample,
        attempt=candidate.attempt,
        digest=candidate.digest.hex(),
        request=Raw(candidate.request.encode()),
    )
    return lease, TrackedLease(
        lease.lease_id, lane, candidate.task_id, node, allowance.version, None, candidate.request
    )


def to_change(
    rows: Sequence[Sequence[Any]],
    old_state: WorkState,
    new_state: WorkState,
    outcome: SessionOutcome,
    cursor: int | None = None,
) -> WorkChange | None:
    """Converts the changed row (run, task_id, sample, lane); None where no row was changed."""
    for run, task_id, sample, lane in rows:
        return WorkChange(Lane(run, lane), task_id, sample, old_state, new_state, outcome, cursor)
    return None


def make_count_parameters(change: WorkChange, now: float) -> dict[str, object]:
    assert change.cursor is not None
    return {
        "run": change.lane.run,
        "task_id": change.task_id,
        "usable": int(change.outcome.reason is None),
        "now": now,
        "cursor": change.cursor + 1,
    }


def make_lease_parameters(lease_id: LeaseId) -> dict[str, int]:
    return {"work_id": lease_id.work_id, "fence": lease_id.fence}


def restore_lease(row: Sequence[Any], node: str) -> tuple[Lease, TrackedLease]:
    """Restores a lease from its row."""
    work_id, fence, run, lane, task_id, sample, attempt, version, cancelled, digest, request = row
    lease = Lease(work_id, fence, run, task_id, sample, attempt, digest.hex(), Raw(request.encode()))
    return lease, TrackedLease(lease.lease_id, Lane(run, lane), task_id, node, version, cancelled, request)

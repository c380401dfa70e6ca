"""What the queue is made of: tasks, the work of their samples, and what becomes of it."""

from typing import Literal

from msgspec import Struct

from polar.records.result import ResultUnit
from polar.rollout.protocol import FinishStatus, LeaseId, SessionOutcome

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
    summary: str | None  # an Ended, as JSON


class NewTask(Struct):
    run: str
    task_id: str
    samples: int
    enough: int | None
    lane: str
    priority: int
    callback_url: str | None
    digest: bytes  # of what makes it this task; its callback_url is none of that
    request: str
    rerun: bool = False  # one of this name that has ended is run again


class AdmittedTask(Struct):
    """What became of a NewTask."""

    row: TaskRow  # as it is in the queue now; it may have other content
    is_new: bool = True
    replaced: TaskRow | None = None  # the ended task of this name that it takes the place of
    has_new_callback: bool = False  # it was there, and another address is to be told of its end


class Lane(Struct, frozen=True):
    """Work of one run that takes one kind of runtime: nobody else's priorities matter in it."""

    run: str
    name: str


class LeaseAllowance(Struct, frozen=True):
    """What a node may have of a lane."""

    lane: Lane
    max_sessions: int  # of the run, shared by its lanes
    running: int  # of the run, by now: of equally urgent work, that of the least busy run goes first
    version: int | None  # of the policy
    is_isolation_node: bool = (
        False  # the node gets nothing that is less urgent than work that is to run alone, until it is idle
    )


class LeaseCandidate(Struct):
    """The next of a lane."""

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
    has_callback: bool  # somebody is to be told


class FinishResult(Struct):
    """What became of something that was said to have ended."""

    status: FinishStatus
    change: "WorkChange | None" = None  # None where it was heard before, or too late


class WorkChange(Struct):
    """Some work is no longer what it was."""

    lane: Lane
    task_id: str
    sample: int
    old_state: WorkState
    new_state: WorkState
    outcome: SessionOutcome
    cursor: int | None = None
    ended_task: EndedTask | None = None  # that ended with it
    triggers_early_stop: bool = False  # its task has enough graded sessions now: the others are not wanted any more
    cancelled_work: list["WorkChange"] = []  # of those, what had not begun


class ConsumerPosition(Struct, frozen=True):
    """How far a consumer has taken everything."""

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

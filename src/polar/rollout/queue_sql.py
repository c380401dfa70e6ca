"""The queue's SQL, and the rows that it reads."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from msgspec import Struct

from polar.store.sql import Style, named, read

WorkState = Literal["queued", "leased", "waiting", "done"]


@dataclass(frozen=True)
class Queries:
    fact: str
    keep_fact: str
    first_fact: str
    counter: str
    hold: str
    take: str
    runs: str
    keep_run: str
    insert_task: str
    insert_work: str
    task: str
    tasks_after: str
    tasks_to_tell: str
    told: str
    work_of: str
    work_after: str
    heads: str
    lease: str
    leased_to: str
    leased_work: str
    leases: str
    finish: str
    work: str
    count_end: str
    try_again: str
    hand_back: str
    go_on: str
    waiting: str
    cancel_task: str
    counts: str
    totals: str
    usable_after: str
    consumers: str
    keep_consumer: str
    ended_up_to: str
    sessions_of: str
    drop_exchanges: str
    drop_session: str
    drop_work: str
    drop_task: str


@cache
def queries(style: Style) -> Queries:
    return named(Queries, read(__package__, "queue.sql"), style)


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

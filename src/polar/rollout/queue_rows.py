"""Records to parameters of the queue's SQL, and rows to records."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from polar.rollout.protocol import Lease, LeaseId, SessionOutcome
from polar.rollout.records import (
    Lane,
    LeaseAllowance,
    LeaseCandidate,
    NewTask,
    TaskRow,
    TrackedLease,
    WorkChange,
    WorkState,
)


def work_parameters(task: NewTask, first: int) -> list[dict[str, object]]:
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


def task_parameters(task: NewTask, now: float) -> dict[str, object]:
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


def new_task_row(task: NewTask, now: float) -> TaskRow:
    """As it is in the database when it has just come."""
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


class _Request(msgspec.Struct):
    """Of a TaskRequest, what is needed here."""

    callback_url: str | None = None


_decode_request = msgspec.json.Decoder(_Request).decode


def parse_callback_url(request: str) -> str | None:
    """Of a TaskRequest, as JSON."""
    return _decode_request(request).callback_url


def end_parameters(ended: SessionOutcome, state: WorkState, cursor: int) -> dict[str, object]:
    return {
        "work_id": ended.work_id,
        "fence": ended.fence,
        "state": state,
        "session_id": ended.session_id,
        "usable": int(ended.reason is None),
        "summary": msgspec.json.encode(ended).decode(),
        "cursor": cursor,
    }


def make_lease(head: LeaseCandidate, allowance: LeaseAllowance, node: str) -> tuple[Lease, TrackedLease]:
    lane, fence = allowance.lane, head.fence + 1
    lease = Lease(
        work_id=head.work_id,
        fence=fence,
        run=lane.run,
        task_id=head.task_id,
        sample=head.sample,
        attempt=head.attempt,
        digest=head.digest.hex(),
        request=Raw(head.request.encode()),
    )
    return lease, TrackedLease(lease.lease_id, lane, head.task_id, node, allowance.version, None, head.request)


def to_change(
    rows: Sequence[Sequence[Any]], was: WorkState, became: WorkState, ended: SessionOutcome, cursor: int | None = None
) -> WorkChange | None:
    """Of the row (run, task_id, sample, lane) that was changed, if one was."""
    for run, task_id, sample, lane in rows:
        return WorkChange(Lane(run, lane), task_id, sample, was, became, ended, cursor)
    return None


def count_parameters(change: WorkChange) -> dict[str, object]:
    assert change.cursor is not None
    return {
        "run": change.lane.run,
        "task_id": change.task_id,
        "usable": int(change.outcome.reason is None),
        "now": time.time(),
        "cursor": change.cursor + 1,
    }


def lease_parameters(held: LeaseId) -> dict[str, int]:
    return {"work_id": held.work_id, "fence": held.fence}


def restore_lease(row: Sequence[Any], node: str) -> tuple[Lease, TrackedLease]:
    """Of what a node has without knowing."""
    work_id, fence, run, lane, task_id, sample, attempt, version, cancelled, digest, request = row
    lease = Lease(work_id, fence, run, task_id, sample, attempt, digest.hex(), Raw(request.encode()))
    return lease, TrackedLease(lease.lease_id, Lane(run, lane), task_id, node, version, cancelled, request)

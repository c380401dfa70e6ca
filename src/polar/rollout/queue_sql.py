"""The queue's SQL."""

from dataclasses import dataclass
from functools import cache

from polar.store.sql import Style, named, read


@dataclass(frozen=True)
class Queries:
    fact: str
    keep_fact: str
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
    set_callback: str
    recent_tasks: str
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
    marked: str
    add_exposure: str
    add_control: str
    add_control_death: str
    case_against: str
    acquit: str
    go_on: str
    waiting: str
    cancel_task: str
    counts: str
    totals: str
    usable_after: str
    usable_in_tasks_after: str
    consumers: str
    keep_consumer: str
    ended_up_to: str
    sessions_of: str
    keep_replaced: str
    replaced_up_to: str
    drop_replaced: str
    drop_exchanges: str
    drop_session: str
    drop_work: str
    drop_task: str


@cache
def queries(style: Style) -> Queries:
    return named(Queries, read(__package__, "queue.sql"), style)

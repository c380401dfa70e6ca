"""The queue's SQL."""

from dataclasses import dataclass
from functools import cache

from polar.store.sql import ParameterStyle, parse_queries, read_sql


@dataclass(frozen=True)
class Queries:
    fact: str
    save_fact: str
    counter: str
    lock_counter: str
    advance_counter: str
    runs: str
    save_run: str
    insert_task: str
    insert_work: str
    task: str
    tasks_after: str
    tasks_awaiting_callback: str
    redirect_callback: str
    recent_tasks: str
    set_callback_state: str
    task_work: str
    work_after: str
    lease_candidates: str
    lease: str
    node_leases: str
    leased_work: str
    leases: str
    finish: str
    work: str
    count_end: str
    retry: str
    release: str
    suspect_work: str
    add_exposure: str
    add_control: str
    add_control_death: str
    suspect_record: str
    retract_kill: str
    requeue: str
    waiting_work: str
    cancel_task: str
    counts: str
    totals: str
    usable_after: str
    usable_in_tasks_after: str
    consumers: str
    save_consumer: str
    tasks_ended_up_to: str
    task_sessions: str
    keep_replaced: str
    replaced_up_to: str
    drop_replaced: str
    drop_exchanges: str
    drop_session: str
    drop_work: str
    drop_task: str


@cache
def queries(style: ParameterStyle) -> Queries:
    return parse_queries(Queries, read_sql(__package__, "queue.sql"), style)

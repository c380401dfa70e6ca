"""The queue, one transaction after the other, on SQLite and on PostgreSQL."""

import asyncio

import msgspec
import pytest

from polar.records.session import Verdict
from polar.rollout.protocol import Lease, LeaseId, SessionOutcome
from polar.rollout.queue import Queue, QueueDatabase
from polar.rollout.queue.database import Superseded
from polar.rollout.queue.records import ConsumerPosition, FinishResult, Lane, LeaseAllowance, NewTask, WorkChange
from polar.rollout.service import Retention
from polar.store.relational import RelationalStore
from tests.conditions import wait_until
from tests.unit.store.samples import exchange, session

ATTEMPTS = 3


def new(
    task_id: str,
    samples: int = 1,
    *,
    run: str = "default",
    lane: str = "local",
    priority: int = 0,
    enough: int | None = None,
    callback: bool = False,
    content: str = "",
) -> NewTask:
    request = f'{{"task_id":"{task_id}","instruction":"{content}"}}'
    url = "http://127.0.0.1:1/" if callback else None
    return NewTask(run, task_id, samples, enough, lane, priority, url, request.encode()[:16], request)


def allowed(run: str = "default", lane: str = "local", *, most: int = 1000, busy: int = 0) -> LeaseAllowance:
    return LeaseAllowance(Lane(run, lane), most, busy, 7)


@pytest.fixture
async def queue(store: RelationalStore) -> Queue:
    return Queue(await QueueDatabase.open(store))


async def leased(
    queue: Queue,
    room: int = 100,
    *,
    node: str = "n",
    holding: list[LeaseId] | None = None,
    allowances: list[LeaseAllowance] | None = None,
    slots: int = 16,
) -> list[Lease]:
    pairs = await queue.lease(node, holding or [], [allowed()] if allowances is None else allowances, room, slots)
    return [lease for lease, _ in pairs]


def ended(lease: Lease, reason: str | None = None, session_id: str | None = None) -> SessionOutcome:
    reward = 1.0 if reason is None else None
    return SessionOutcome(lease.work_id, lease.fence, session_id or f"s{lease.work_id}-{lease.fence}", reward, reason)


async def finished(queue: Queue, *all_ended: SessionOutcome) -> list[FinishResult]:
    return await queue.finish(all_ended, ATTEMPTS)


def change_of(outcome: FinishResult) -> WorkChange:
    assert outcome.change is not None
    return outcome.change


async def test_a_task_told_twice_is_there_once(queue: Queue) -> None:
    first, other = await queue.submit([new("a", 3), new("b")])
    assert (first.is_new, other.is_new) == (True, True)
    (again,) = await queue.submit([new("a", 3)])
    assert not again.is_new
    assert again.row == first.row
    (changed,) = await queue.submit([new("a", 3, content="something else")])
    assert (changed.row, changed.is_new) == (first.row, False)
    assert len(await leased(queue)) == 4
    assert other.row.samples == 1


async def test_the_urgent_ones_go_first_and_among_equals_the_older(queue: Queue) -> None:
    await queue.submit([new("low", priority=-1), new("first"), new("second"), new("high", priority=5)])
    assert [lease.task_id for lease in await leased(queue, 2)] == ["high", "first"]
    assert [lease.task_id for lease in await leased(queue, 9, node="m")] == ["second", "low"]


async def test_a_node_gets_only_lanes_that_it_can_serve_and_no_more_than_a_run_may_have(queue: Queue) -> None:
    await queue.submit([new("a", 5), new("b", 5, lane="docker"), new("c", 5, run="other")])
    lanes = [allowed(most=3), allowed("other", most=1)]
    got = await leased(queue, 100, allowances=lanes)
    assert sorted(lease.task_id for lease in got) == ["a", "a", "a", "c"]
    both = [allowed(most=2), allowed(lane="docker", most=2)]
    assert len(await leased(queue, 100, node="m", allowances=both)) == 2  # the run's limit holds for all of its lanes


async def test_of_equally_urgent_work_that_of_the_least_busy_run_goes_first(queue: Queue) -> None:
    await queue.submit([new("a", 5), new("c", 5, run="other")])
    got = await leased(queue, 5, allowances=[allowed(busy=9), allowed("other")])
    assert [lease.run for lease in got] == ["other"] * 5


async def test_what_a_node_does_not_know_that_it_has_comes_again(queue: Queue) -> None:
    await queue.submit([new("a", 3)])
    first = await leased(queue, 2)
    again = await leased(queue, 2)  # its answer was lost
    assert again == first
    more = await leased(queue, 2, holding=[lease.lease_id for lease in first])
    assert [lease.sample for lease in more] == [2]


async def test_an_end_that_is_told_twice_counts_once(queue: Queue) -> None:
    await queue.submit([new("a", 2)])
    one, two = await leased(queue)
    (outcome,) = await finished(queue, ended(one))
    assert (outcome.status, change_of(outcome).new_state) == ("taken", "done")
    (outcome,) = await finished(queue, ended(one))
    assert outcome == FinishResult("taken")
    task = await queue.get_task("default", "a")
    assert task is not None
    assert (task.ended, task.usable, task.state, task.cursor) == (1, 1, "running", None)
    (outcome,) = await finished(queue, ended(two, "harness_failed"))
    task = await queue.get_task("default", "a")
    assert task is not None
    assert (task.ended, task.usable, task.state) == (2, 1, "completed")
    assert change_of(outcome).ended_task is not None


async def test_only_the_last_lease_can_end_some_work(queue: Queue) -> None:
    await queue.submit([new("a")])
    (old,) = await leased(queue)
    (change,) = await queue.release_leases("n", died=True)
    assert (change.old_state, change.new_state) == ("leased", "queued")
    (fresh,) = await leased(queue, node="m")
    assert (fresh.work_id, fresh.fence) == (old.work_id, old.fence + 1)
    assert await finished(queue, ended(old)) == [FinishResult("lost")]
    (outcome,) = await finished(queue, ended(fresh))
    assert outcome.status == "taken"
    assert await finished(queue, ended(old)) == [FinishResult("lost")]
    ((row),) = await queue.list_work_after("default", 0, 10)
    assert row.session_id == ended(fresh).session_id


async def test_the_platforms_failures_are_tried_again_so_many_times(queue: Queue) -> None:
    await queue.submit([new("a")])
    for _ in range(ATTEMPTS - 1):
        (lease,) = await leased(queue)
        (outcome,) = await finished(queue, ended(lease, "sandbox_failed"))
        assert change_of(outcome).new_state == "waiting"
        assert await leased(queue) == []
        assert await finished(queue, ended(lease, "sandbox_failed")) == [FinishResult("taken")]  # its answer was lost
        assert await queue.list_waiting_work() == [lease.work_id]
        assert await queue.requeue([lease.work_id]) == [Lane("default", "local")]
    (lease,) = await leased(queue)
    (outcome,) = await finished(queue, ended(lease, "sandbox_failed"))
    assert change_of(outcome).new_state == "done"
    task = await queue.get_task("default", "a")
    assert task is not None
    assert (task.state, task.usable) == ("failed", 0)


async def test_what_is_handed_back_counts_as_no_try(queue: Queue) -> None:
    await queue.submit([new("a")])
    for _ in range(2 * ATTEMPTS):
        (lease,) = await leased(queue)
        (outcome,) = await finished(queue, ended(lease, "interrupted"))
        assert change_of(outcome).new_state == "queued"
    (lease,) = await leased(queue)
    assert lease.attempt == 0


async def test_what_kills_its_nodes_is_set_aside_and_what_was_nearby_is_not(queue: Queue) -> None:
    await queue.submit([new("poison", priority=1), *(new(f"good-{number}") for number in range(20))])
    lost = 0
    results: dict[str, str | None] = {}
    for round in range(60):
        node = f"n{round}"
        got = await leased(queue, 8, node=node, slots=8)
        await queue.record_lifetimes({node: 5.0, "idle": 60.0})
        if not got:
            break
        if any(lease.task_id == "poison" for lease in got):
            lost += 1
            changes = await queue.release_leases(node, died=True)
            results |= {change.task_id: change.outcome.reason for change in changes if change.new_state == "done"}
        else:
            for outcome in await finished(queue, *(ended(lease) for lease in got)):
                results[change_of(outcome).task_id] = None
    assert results.pop("poison") == "node_killer"
    assert len(results) == 20
    assert set(results.values()) == {None}
    assert 4 <= lost <= 8


async def lose_with(queue: Queue, task_id: str, node: str, *, others: float, deaths: int) -> WorkChange:
    """A node dies that has only this task, after 5 seconds; other nodes live so long, and so many of them die."""
    (lease,) = await leased(queue, 8, node=node)
    assert lease.task_id == task_id
    await queue.record_lifetimes({node: 5.0, "idle": others})
    for number in range(deaths):
        assert await queue.release_leases(f"{node}-{number}", died=True) == []
    (change,) = await queue.release_leases(node, died=True)
    return change


async def test_nothing_is_blamed_where_nodes_die_without_it_as_well(queue: Queue) -> None:
    await queue.submit([new("innocent")])
    for number in range(20):
        change = await lose_with(queue, "innocent", f"n{number}", others=60, deaths=12)
        assert change.new_state == "queued"
    assert (await leased(queue))[0].attempt == 0


async def test_what_kills_every_node_is_set_aside_while_others_live(queue: Queue) -> None:
    await queue.submit([new("killer")])
    changes = [await lose_with(queue, "killer", f"n{number}", others=60, deaths=0) for number in range(4)]
    while changes[-1].new_state == "queued":
        changes.append(await lose_with(queue, "killer", f"n{len(changes)}", others=60, deaths=0))
    assert changes[-1].outcome.reason == "node_killer"
    assert len(changes) <= 8


async def test_a_suspect_waits_until_nodes_have_lived_long_enough_without_it(queue: Queue) -> None:
    await queue.submit([new("suspect")])
    for node in ("a", "b"):
        await leased(queue, node=node)
        await queue.record_lifetimes({node: 100.0})
        await queue.release_leases(node, died=True)
    assert await leased(queue, node="c") == []
    await queue.record_lifetimes({"c": 299.0})
    assert await leased(queue, node="c") == []
    await queue.record_lifetimes({"c": 2.0})
    assert len(await leased(queue, node="c")) == 1


async def test_a_loner_runs_alone_and_one_node_is_kept_free_for_it(queue: Queue) -> None:
    await queue.submit([new("loner")])
    for number in range(3):
        await lose_with(queue, "loner", f"n{number}", others=60, deaths=0)
    await queue.record_lifetimes({"idle": 600.0})
    await queue.submit([new("urgent", priority=1), *(new(f"other-{number}") for number in range(6))])
    (first,) = await leased(queue, 1, node="busy")
    assert first.task_id == "urgent"
    got = await leased(
        queue, 2, node="busy", holding=[first.lease_id]
    )  # it is not alone there, so that it is passed by
    assert [lease.task_id for lease in got] == ["other-0", "other-1"]
    (other,) = await leased(queue, 1, node="kept", allowances=[allowed(lane="local", most=1)])
    assert other.task_id == "loner"
    assert await leased(queue, 8, node="kept", holding=[other.lease_id]) == []
    await queue.release_leases("kept", died=False)
    isolating = msgspec.structs.replace(allowed(), is_isolation_node=True)
    assert (
        await leased(
            queue, 8, node="busy", holding=[first.lease_id, *(one.lease_id for one in got)], allowances=[isolating]
        )
        == []
    )


async def test_a_node_that_was_told_to_end_leaves_no_mark(queue: Queue) -> None:
    await queue.submit([new("a")])
    for number in range(20):
        await leased(queue, node=f"n{number}")
        (change,) = await queue.release_leases(f"n{number}", died=False)
        assert change.new_state == "queued"
    assert not await queue.record_lifetimes({"idle": 1.0})


async def test_a_death_that_was_none_is_taken_back(queue: Queue) -> None:
    await queue.submit([new("a")])
    (lease,) = await leased(queue)
    await queue.release_leases("n", died=True)
    assert await queue.record_lifetimes({})
    await queue.retract_kills([lease.work_id])
    assert not await queue.record_lifetimes({})


async def test_enough_graded_sessions_end_a_task(queue: Queue) -> None:
    await queue.submit([new("a", 6, enough=2)])
    one, two, three = await leased(queue, 3)
    await finished(queue, ended(one))
    (outcome,) = await finished(queue, ended(two))
    change = change_of(outcome)
    assert change.triggers_early_stop
    assert [other.outcome.reason for other in change.cancelled_work] == ["early_stop"] * 3
    (outcome,) = await finished(queue, ended(three))  # it ran, and counts
    assert change_of(outcome).ended_task is not None
    task = await queue.get_task("default", "a")
    assert task is not None
    assert (task.ended, task.usable, task.cancelled) == (6, 3, "early_stop")


async def test_two_that_end_together_stop_a_task_once(queue: Queue) -> None:
    await queue.submit([new("a", 5, enough=1)])
    one, two = await leased(queue, 2)
    outcomes = await finished(queue, ended(one), ended(two))
    assert sum(len(change_of(outcome).cancelled_work) for outcome in outcomes) == 3
    task = await queue.get_task("default", "a")
    assert task is not None
    assert (task.ended, task.samples, task.state) == (5, 5, "completed")


async def test_a_cancelled_task_ends_what_has_not_begun_and_is_never_tried_again(queue: Queue) -> None:
    await queue.submit([new("a", 4)])
    runs, fails, dies = await leased(queue, 3)
    changes = await queue.cancel("default", "a", "cancelled")
    assert changes is not None
    assert [(change.sample, change.outcome.reason) for change in changes] == [(3, "cancelled")]
    assert await queue.cancel("default", "a", "cancelled") == []
    assert await queue.cancel("default", "nobody", "cancelled") is None
    outcomes = await finished(queue, ended(runs), ended(fails, "engine_failed"))
    assert [change_of(outcome).new_state for outcome in outcomes] == ["done", "done"]
    (change,) = await queue.release_leases("n", died=True)
    assert (change.outcome.lease_id, change.new_state) == (dies.lease_id, "done")
    assert change.ended_task is not None


async def test_cursors_only_grow_and_each_result_is_found_once(queue: Queue) -> None:
    await queue.submit([new(f"t{number}", 2) for number in range(5)])
    leases = await leased(queue)
    for lease in reversed(leases):
        await finished(queue, ended(lease))
    seen, after = [], 0
    while page := await queue.list_work_after("default", after, 3):
        seen += page
        cursors = [row.cursor for row in page]
        assert cursors == sorted(cursors, key=lambda cursor: cursor or 0)
        after = page[-1].cursor or 0
    assert sorted((row.task_id, row.sample) for row in seen) == sorted((one.task_id, one.sample) for one in leases)
    tasks = await queue.list_tasks_after("default", 0, 100)
    assert [task.task_id for task in tasks] == [f"t{number}" for number in reversed(range(5))]
    by_task = {task.task_id: task.cursor for task in tasks}
    assert all((row.cursor or 0) < (by_task[row.task_id] or 0) for row in seen)  # a group comes after all of its own


async def test_what_is_counted(queue: Queue) -> None:
    await queue.submit([new("a", 5), new("b", lane="docker")])
    one, two = await leased(queue, 2)
    await finished(queue, ended(one, "engine_failed"), ended(two))
    counts = await queue.load_counts()
    local, docker = counts[Lane("default", "local")], counts[Lane("default", "docker")]
    assert (local.queued, local.leased, local.waiting, docker.queued) == (3, 0, 1, 1)
    totals = (await queue.load_totals())["default"]
    assert (totals.tasks, totals.ended, totals.usable) == (2, 1, 1)
    assert await queue.count_usable_after("default", 0, "session") == 1
    last_cursor = await queue.read_last_cursor()
    assert await queue.count_usable_after("default", last_cursor, "session") == 0
    assert await queue.count_usable_after("default", last_cursor, "group") == 1  # its task has not ended


async def test_callbacks_wait_until_somebody_says_otherwise(queue: Queue) -> None:
    await queue.submit([new("a", callback=True), new("b"), new("c", callback=True)])
    await finished(queue, *(ended(lease) for lease in await leased(queue)))
    assert [task.task_id for task in await queue.list_tasks_awaiting_callback(0, 10)] == ["a", "c"]
    await queue.set_callback_state("default", "a", "acknowledged")
    assert [task.task_id for task in await queue.list_tasks_awaiting_callback(0, 10)] == ["c"]


async def test_a_server_that_another_one_has_replaced_writes_nothing(queue: Queue, store: RelationalStore) -> None:
    await queue.submit([new("a")])
    (lease,) = await leased(queue)
    newer = Queue(await QueueDatabase.open(store))
    for write in (
        queue.submit([new("b")]),
        queue.finish([ended(lease)], ATTEMPTS),
        queue.release_leases("n", died=True),
    ):
        with pytest.raises(Superseded):
            await write
    assert await newer.get_task("default", "b") is None
    assert [tracked.lease_id for tracked in await newer.list_leases()] == [lease.lease_id]


async def test_what_is_kept_of_runs_consumers_and_the_store(queue: Queue, store: RelationalStore) -> None:
    await queue.save_run("r", "{}")
    await queue.save_run("r", '{"a":1}')
    await queue.save_consumer("r", "trainer", ConsumerPosition(3, "session"))
    await queue.save_consumer("r", "trainer", ConsumerPosition(5, "group"))
    again = Queue(await QueueDatabase.open(store))
    assert await again.load_runs() == {"r": '{"a":1}'}
    assert await again.load_consumers() == {("r", "trainer"): ConsumerPosition(5, "group")}
    assert len({await store.ensure_store_id() for _ in range(3)}) == 1


async def test_sessions_of_a_task_that_was_run_again_are_forgotten_too(queue: Queue, store: RelationalStore) -> None:
    await queue.submit([new("a")])
    ends: list[int] = []
    for name in ("first", "second"):
        (lease,) = await leased(queue)
        await store.create_session(session(name))
        await store.append(exchange(name, 0, [b"1"]))
        await finished(queue, ended(lease, session_id=name))
        ends.append(await queue.read_last_cursor())
        (admitted,) = await queue.submit([msgspec.structs.replace(new("a"), rerun=True)])
        assert admitted.replaced is not None
    assert await queue.delete_ended_tasks(ends[0], 10) == 1
    assert await store.find_session("first") is None
    assert await store.find_session("second") is not None
    assert await queue.get_task("default", "a") is not None
    assert await queue.delete_ended_tasks(ends[0], 10) == 0
    assert await queue.delete_ended_tasks(ends[1], 10) == 1
    assert await store.find_session("second") is None


async def test_what_ended_long_ago_is_forgotten_and_cursors_go_on(queue: Queue, store: RelationalStore) -> None:
    await queue.submit([new("old"), new("untold", callback=True), new("runs", 2)])
    for lease in (await leased(queue))[:3]:
        await store.create_session(session(name := f"session-{lease.work_id}"))
        await store.append(exchange(name, 0, [b"1"]))
        await store.append(exchange(name, 1, [b"1", b"2"]))
        await store.end_session(name, ended_at=1.0, verdict=Verdict(1.0))
        await finished(queue, ended(lease, session_id=name))
    last = await queue.read_last_cursor()
    keeping = asyncio.create_task(Retention(queue, hours=0.2 / 3600).run())

    async def is_forgotten() -> bool:
        return await queue.get_task("default", "old") is None

    await wait_until(is_forgotten)
    keeping.cancel()
    assert await store.find_session("session-1") is None
    assert await store.find_session("session-2") is not None  # nobody was told of it yet
    assert await queue.get_task("default", "untold") is not None
    assert await queue.get_task("default", "runs") is not None
    assert [row.task_id for row in await queue.list_work_after("default", 0, 10)] == ["untold", "runs"]
    await queue.submit([new("old")])  # as if it had never been
    (lease,) = await leased(queue, holding=[tracked.lease_id for tracked in await queue.list_leases()])
    await finished(queue, ended(lease))
    assert [row.cursor for row in await queue.list_work_after("default", last, 10)] != []

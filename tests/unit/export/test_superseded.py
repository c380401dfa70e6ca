"""A sample that was run twice, because its node died before the server heard of its end, goes out once."""

from pathlib import Path
from typing import Any

from polar.export.pipeline import ExportTally, Selection, select_items
from polar.records.session import Session, Verdict
from polar.rollout.protocol import SessionOutcome
from polar.rollout.queue import Queue, QueueDatabase
from polar.rollout.queue.records import Lane, LeaseAllowance, NewTask
from polar.store.relational import RelationalStore
from polar.store.sqlite import open_sqlite_store
from polar.trajectory.builders import prefix_merging


async def exported(store: RelationalStore) -> tuple[set[str], ExportTally]:
    tally = ExportTally()
    found = {
        item.session.session_id async for item in select_items(store, Selection(), frozenset(), prefix_merging, tally)
    }
    return found, tally


async def test_of_two_sessions_of_a_sample_the_one_that_counts_goes_out(tmp_path: Path) -> None:
    store = open_sqlite_store(tmp_path / "polar.db")
    queue = Queue(await QueueDatabase.open(store))
    await queue.submit([NewTask("default", "t", 1, None, "local", 0, None, b"digest", "{}")])
    ((lease, _),) = await queue.lease("n", [], [LeaseAllowance(Lane("default", "local"), 9, 0, 0)], 1, 1)

    async def graded(session_id: str, **metadata: Any) -> None:
        await store.create_session(Session(session_id, session_id.encode(), 0.0, metadata=metadata))
        await store.end_session(session_id, ended_at=1.0, verdict=Verdict(1.0))

    await graded("lost", task_id="t", sample=0, work_id=lease.work_id)
    await graded("counts", task_id="t", sample=0, work_id=lease.work_id)
    await graded("by hand", task_id="t", sample=0)
    await graded("another task's", task_id="u", sample=0, work_id=lease.work_id)
    assert len((await exported(store))[0]) == 4  # nobody knows yet which one counts
    await queue.finish([SessionOutcome(lease.work_id, lease.fence, "counts", 1.0)], 3)
    found, tally = await exported(store)
    assert found == {"counts", "by hand", "another task's"}
    assert tally.left_out == {"whose sample another session stands for": {"superseded": 1}}
    await store.close()

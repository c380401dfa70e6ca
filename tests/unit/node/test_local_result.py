"""What `polar run --json` and `polar.run` hand out is verified first."""

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from polar.config import Settings
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.node.task_plan import TaskPlan
from polar.records.session import Session, Verdict
from polar.records.task import TaskRequest
from polar.store.sqlite import open_sqlite_store
from polar.testing.conversations import ConversationBuilder, make_text_parts


async def test_a_damaged_session_is_held_back(tmp_path: Path) -> None:
    store = open_sqlite_store(tmp_path / "polar.db")
    await store.create_session(Session("s", b"s", 1.0, metadata={"task_id": "t"}))
    talk = ConversationBuilder("s")
    talk.add_call([{"role": "user", "content": "List the files."}], make_text_parts("None."))
    await store.append(talk.exchanges[0])
    await store.end_session("s", ended_at=5.0, verdict=Verdict(1.0))
    rollout = LocalRollout(Settings(), tmp_path)
    rollout.plane = cast(Any, SimpleNamespace(store=store))
    task = TaskRequest.model_validate({"task_id": "t", "instruction": "do it"})
    plan = cast(TaskPlan, SimpleNamespace(task=task))
    finished = FinishedSession("s", "t", 0, Verdict(1.0), {}, tmp_path)
    sound = await rollout.build_result(plan, finished)
    assert (sound["reward"], len(sound["trajectory"]["traces"])) == (1.0, 1)
    with closing(sqlite3.connect(tmp_path / "polar.db", isolation_level=None)) as db:
        db.execute("UPDATE exchanges SET logprobs = zeroblob(length(logprobs))")
    held = await rollout.build_result(plan, finished)
    assert (held["status"], held["reward"], held["reason"]) == ("ERROR", None, "verify_failed")
    assert (held["trajectory"]["status"], held["trajectory"]["traces"]) == ("ERROR", [])
    assert "polar verify s" in held["error"]
    await store.close()

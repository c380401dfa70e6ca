"""The task API and the feed of results, over HTTP."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from polar.records.result import SessionResult, TaskResult, TaskStatus
from polar.rollout import result_pages
from polar.rollout.protocol import SessionOutcome
from polar.trajectory import session as sessions
from tests.unit.rollout.served import NODE, beating, page_of, served, task


async def test_a_task_is_submitted_run_and_read(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        answer = await it.http.post("/rollout/task/submit", json=task(num_samples=2))
        assert (answer.status_code, answer.json()) == (200, {"task_id": "t", "status": "running"})
        running = await it.http.get("/rollout/task/t")
        assert TaskStatus.model_validate(running.json()).results == []
        ids = await it.run_all(seconds={"run": 2.0})
        ended = TaskResult.model_validate((await it.http.get("/rollout/task/t")).json())
        assert (ended.status, ended.total_sessions, ended.completed_sessions) == ("completed", 2, 2)
        assert [result.session_id for result in ended.results] == ids
        for result in ended.results:
            assert (result.status, result.reward, result.node_id) == ("COMPLETED", 1.0, NODE)
            assert result.timing.model_dump() == {
                "register_to_init_queue_ms": 0.0,
                "init_ms": 0.0,
                "run_ms": 2000.0,
                "postrun_ms": 0.0,
            }
            assert result.metadata["timing"]["stages"] == {"run": 2.0}
            (trace,) = result.trajectory.traces
            assert sum(trace.loss_mask) > 0
            assert trace.reward == 1.0
            assert trace.response_messages[0]["content"] == "None 0."
        bare = (await it.http.get("/rollout/task/t", params={"results": "false"})).json()
        assert (bare["status"], bare["results"]) == ("completed", [])


async def test_a_task_told_twice_is_there_once_and_another_one_of_its_name_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        for _ in range(2):
            assert (await it.http.post("/rollout/task/submit", json=task())).status_code == 200
        other = await it.http.post("/rollout/task/submit", json=task(num_samples=3))
        assert other.status_code == 409
        assert "task_id" in other.json()["detail"]
        assert it.rollout.count_sessions()["default"]["queued"] == 1
        elsewhere = await it.http.post("/rollout/task/submit", json=task(num_samples=3, run="other"))
        assert elsewhere.status_code == 200
        assert (await it.http.get("/rollout/task/t", params={"run": "other"})).json()["total_sessions"] == 3
        by_query = await it.http.post("/rollout/task/submit", params={"run": "third"}, json=task())
        assert by_query.status_code == 200
        assert it.rollout.count_sessions()["third"]["queued"] == 1


async def test_of_many_tasks_each_is_answered_by_itself(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.http.put("/runs/default", json={"max_queued": 3})
        tasks = [
            task("a"),
            task("b", surprise=1),
            {"instruction": "x"},
            7,
            task("c", num_samples=2),
            task("d"),
            task("a", num_samples=9),
            task("e\u0000"),
        ]
        answer = await it.http.post("/rollout/tasks", json={"tasks": tasks})
        assert answer.status_code == 200
        told = answer.json()["tasks"]
        assert [(one.get("task_id"), one.get("status"), one.get("code")) for one in told] == [
            ("a", "running", None),
            ("b", None, 422),
            (None, None, 422),
            (None, None, 422),
            ("c", "running", None),
            ("d", None, 429),
            ("a", None, 422),  # more than there will ever be room for
            ("e\u0000", None, 422),
        ]
        assert "surprise" in told[1]["error"]
        assert told[5]["retry_after"] > 0
        alone = await it.http.post("/rollout/task/submit", json=task("d"))
        assert alone.status_code == 429
        assert int(alone.headers["Retry-After"]) >= 0


async def test_ids_may_have_slashes_and_odd_letters(tmp_path: Path) -> None:
    names = ["a/b/c", "ü ñ", "100%", "a?b#c", "..%2f", "submit", "trajectory"]
    async with served(tmp_path) as it:
        await it.submit(*(task(name) for name in names))
        await it.run_all()
        for name in names:
            path = f"/rollout/task/{quote(name, safe='')}"
            status = await it.http.get(path)
            assert status.status_code == 200, name
            assert status.json()["task_id"] == name
            tree = await it.http.get(f"{path}/trajectory")
            assert tree.status_code == 200, name
            assert len(tree.json()["sessions"]) == 1
        refused = await it.http.post("/rollout/task/submit", json=task("a/trajectory"))
        assert refused.status_code == 422


async def test_cancelling(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=3))
        answer = await it.http.delete("/rollout/task/t")
        cancelled = TaskStatus.model_validate(answer.json())
        assert (cancelled.status, cancelled.cancelled, cancelled.cancelled_sessions) == ("failed", "cancelled", 3)
        assert len(cancelled.results) == 3
        ended = TaskStatus.model_validate((await it.http.get("/rollout/task/t")).json())
        assert len({result.session_id for result in ended.results}) == 3
        for result in ended.results:
            assert (result.status, result.reward, result.reason) == ("ERROR", None, "cancelled")
            assert result.trajectory.traces == []
            assert result.trajectory.metadata["reason"] == "cancelled"
        ((group,), _) = page_of(await it.http.get("/rollout/results", params={"unit": "group"}))
        assert (group["asked"], group["usable"], group["cancelled"], len(group["results"])) == (3, 0, 3, 3)
        again = await it.http.delete("/rollout/task/t")
        assert (again.status_code, again.json()["cancelled_sessions"]) == (200, 0)
        assert (await it.http.delete("/rollout/task/none")).status_code == 404


async def test_the_feed_gives_everything_once_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(*(task(f"t{number}", num_samples=2) for number in range(4)))
        ids = await it.run_all(oldest_version=3, newest_version=4)
        seen: list[dict[str, Any]] = []
        cursor = 0
        while True:
            results, cursor = page_of(await it.http.get("/rollout/results", params={"after": cursor, "limit": 3}))
            if not results:
                break
            assert results[-1]["cursor"] == cursor
            seen += results
        assert [result["session_id"] for result in seen] == ids
        for result in seen:
            SessionResult.model_validate(result)
            assert (result["metadata"]["oldest_version"], result["metadata"]["newest_version"]) == (3, 4)
            assert result["metadata"]["stale"] is False
        groups, _ = page_of(await it.http.get("/rollout/results", params={"unit": "group"}))
        assert [group["task_id"] for group in groups] == ["t0", "t1", "t2", "t3"]
        assert [[result["sample"] for result in group["results"]] for group in groups] == [[0, 1]] * 4
        assert page_of(await it.http.get("/rollout/results", params={"run": "other"})) == ([], 0)


async def test_a_page_ends_at_its_bytes_and_has_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=4))
        await it.run_all()
        monkeypatch.setattr(result_pages, "MAX_PAGE_BYTES", 1)
        for _ in range(2):
            results, _ = page_of(await it.http.get("/rollout/results"))
            assert len(results) == 1
        size = len((await it.http.get("/rollout/results")).content)
        monkeypatch.setattr(result_pages, "MAX_PAGE_BYTES", 2 * size)
        results, _ = page_of(await it.http.get("/rollout/results"))
        assert 2 <= len(results) <= 3


async def test_a_reader_waits_for_what_comes(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        for unit in ("session", "group"):
            await it.submit(task(unit))
            await it.join()
            (lease,) = await it.work()
            _, cursor = page_of(await it.http.get("/rollout/results", params={"unit": unit}))
            waiting = asyncio.create_task(
                it.http.get("/rollout/results", params={"after": cursor, "wait": 60, "unit": unit})
            )
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await it.run(lease)
            results, _ = page_of(await asyncio.wait_for(waiting, 120))
            assert [result["task_id"] for result in results] == [unit]
        nothing = await it.http.get("/rollout/results", params={"after": 10**6, "wait": 0.05})
        assert nothing.json() == {"results": [], "cursor": 10**6}


async def test_a_consumer_goes_on_where_it_said_that_it_was(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=4))
        ids = await it.run_all()
        first, cursor = page_of(await it.http.get("/rollout/results", params={"consumer": "c", "limit": 2}))
        again, _ = page_of(await it.http.get("/rollout/results", params={"consumer": "c", "limit": 2}))
        assert first == again
        rest, _ = page_of(await it.http.get("/rollout/results", params={"consumer": "c", "after": cursor}))
        assert [result["session_id"] for result in first + rest] == ids
    async with served(tmp_path) as it:
        rest_again, _ = page_of(await it.http.get("/rollout/results", params={"consumer": "c"}))
        assert rest_again == rest


async def test_builders(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task("t", builder={"strategy": "per_request"}))
        await it.run_all(turns=3)
        for params, traces in (({}, 3), ({"builder": "prefix_merging"}, 1), ({"builder": "prefix_tree"}, 1)):
            ((result,), _) = page_of(await it.http.get("/rollout/results", params=params))
            assert len(result["trajectory"]["traces"]) == traces, params
        unknown = await it.http.get("/rollout/results", params={"builder": "nonsense"})
        assert unknown.status_code == 422
        assert "per_request" in unknown.json()["detail"]


async def test_a_builder_that_fails_hides_no_other_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(paths: Any, builder: str) -> Any:
        if paths.session_id == "s-t-0" and paths.paths:
            raise ZeroDivisionError("oh")
        return run_builder(paths, builder)

    run_builder = sessions.run_builder
    monkeypatch.setattr(sessions, "run_builder", broken)
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all()
        bad, good = page_of(await it.http.get("/rollout/results"))[0]
        assert (bad["session_id"], bad["status"], bad["reward"], bad["reason"]) == (
            "s-t-0",
            "ERROR",
            None,
            "build_failed",
        )
        assert "ZeroDivisionError" in bad["error"]
        assert (good["status"], len(good["trajectory"]["traces"])) == ("COMPLETED", 1)


async def test_a_session_that_the_store_does_not_have_is_told_so(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.join()
        (lease,) = await it.work()
        await it.rollout.lease_manager.finish(NODE, [SessionOutcome(lease.work_id, lease.fence, "gone", reward=1.0)])
        ((result,), _) = page_of(await it.http.get("/rollout/results"))
        assert (result["session_id"], result["reward"], result["reason"]) == ("gone", None, "session_unreadable")
        tree = await it.http.get("/rollout/task/t/trajectory")
        assert (tree.status_code, tree.json()["sessions"]) == (200, [])


async def test_the_tree_of_a_task_is_of_all_its_sessions_with_what_they_earned(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=3))
        await it.join()
        first, second, _ = await it.work()
        await it.run(first, turns=2)
        await it.run(second, reward=None, reason="timeout")
        tree = (await it.http.get("/rollout/task/t/trajectory")).json()
        assert [(one["reward"], one["reason"]) for one in tree["sessions"]] == [(1.0, None), (None, "timeout")]
        assert {term["session_id"] for term in tree["terms"]} == {"s-t-0", "s-t-1"}
        assert sum(len(node["ids"]) for node in tree["nodes"]) == tree["tokens"]["unique"]
        assert tree["nodes"][0]["ids"][:5] == [0, 1, 2, 3, 4]  # the prompt that they share, once


async def test_status_nodes_and_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as it, beating(it, calls=3):
        await it.submit(task(num_samples=2))
        await it.http.put("/runs/exp", json={"max_running": 4, "batch": 8, "max_lag": 1})
        assert (await it.http.get("/runs")).json()["runs"]["exp"] == {
            "max_running": 4,
            "max_queued": None,
            "batch": 8,
            "max_lag": 1,
            "compat": None,
            "engine": None,
        }
        status = (await it.http.get("/rollout/status")).json()
        assert status["runs"]["default"]["queued"] == 2
        assert [node["node_id"] for node in status["nodes"]] == [NODE]
        assert status["policy"]["default"]["replicas"][0]["version"] == 0
        (node,) = (await it.http.get("/nodes")).json()
        assert (node["slots"], node["backends"]) == (100, ["local"])
        assert (await it.http.post(f"/nodes/{NODE}/drain")).json()["draining"] is True
        assert (await it.http.post("/nodes/none/drain")).status_code == 404
        assert (await it.http.get("/health")).json()["status"] == "ok"


async def test_the_document_names_the_fields_of_every_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        paths = (await it.http.get("/openapi.json")).json()["paths"]
        bare = set()
        for path, operations in paths.items():
            for method, operation in operations.items():
                schema = operation["responses"]["200"]["content"].get("application/json", {}).get("schema")
                if schema is not None and "$ref" not in schema and "$ref" not in schema.get("items", {}):
                    bare.add(f"{method} {path}")
        assert bare == {
            "get /rollout/task/{task_id}/trajectory",
            "get /sessions/{session_id}/exchanges",
            "get /sessions/{session_id}/trajectory",
            "post /nodes/{node_id}/finish",  # an array of words
        }


async def test_the_model_of_a_task_has_every_field_of_the_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as it, beating(it):
        await it.submit(task(num_samples=2))
        await it.run((await it.work())[0])
        answer = (await it.http.get("/rollout/task/t")).json()
        status = TaskStatus.model_validate(answer)
        assert not status.model_extra
        assert not any(one.model_extra for one in status.sessions)
        assert status.model_dump(exclude_unset=True) == answer
        assert (status.usable_sessions, status.cancelled, status.ended_at) == (1, None, None)
        assert [(one.sample, one.state, one.node) for one in status.sessions] == [
            (0, "done", NODE),
            (1, "leased", NODE),
        ]


async def test_policy_and_engines_by_run(tmp_path: Path) -> None:
    async with served(tmp_path) as it, beating(it):
        changed = await it.http.post("/policy", json={"version": 3})
        assert [replica["version"] for replica in changed.json()["replicas"]] == [3]
        alone = await it.http.post("/policy/pause", params={"run": "exp"}, json={"mode": "hold"})
        assert alone.status_code == 409  # it shares the default's engines
        added = await it.http.post("/engines", json={"url": "http://127.0.0.1:9/", "run": "exp", "version": 5})
        assert added.json()["replicas"] == [
            {"url": "http://127.0.0.1:9", "version": 5, "running": 0, "down": False, "asleep": False, "refusal": None}
        ]
        paused = await it.http.post("/policy/pause", params={"run": "exp"}, json={"mode": "hold"})
        assert (paused.json()["paused"], paused.json()["mode"]) == (True, "hold")
        assert (await it.http.get("/policy")).json()["paused"] is False
        resumed = await it.http.post("/policy/resume", json={"run": "exp"})
        assert resumed.json()["paused"] is False
        other = await it.http.post("/policy", json={"version": 3, "replica": "http://elsewhere", "run": "exp"})
        assert other.status_code == 404
        assert "http://127.0.0.1:9" in other.json()["detail"]
        removed = await it.http.delete("/engines", params={"url": "http://127.0.0.1:9", "run": "exp"})
        assert [replica["version"] for replica in removed.json()["replicas"]] == [3]
        gone = await it.http.delete("/engines", params={"url": "http://127.0.0.1:9", "run": "exp"})
        assert gone.status_code == 404


async def test_a_pause_is_answered_when_every_node_has_it_in_force(tmp_path: Path) -> None:
    async with served(tmp_path, lease_seconds=60) as it, beating(it):
        await it.join("deaf")
        late = await it.http.post("/policy/pause", json={"mode": "drain", "timeout": 0.2})
        assert late.status_code == 504
        assert "deaf" in late.json()["detail"]
        assert (await it.http.get("/policy")).json()["mode"] == "drain"  # it will be
        await it.rollout.lease_manager.leave("deaf")
        assert (await it.http.post("/policy/pause", json={"mode": "drain"})).json()["paused"] is True


async def test_sessions_by_hand(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        made = (await it.http.post("/sessions", json={"metadata": {"a": 1}})).json()
        session = f"/sessions/{made['session_id']}"
        assert (await it.http.get(session)).json()["metadata"] == {"a": 1}
        assert (await it.http.post(f"{session}/end", json={"reward": 0.5})).json()["reward"] == 0.5
        assert (await it.http.post(f"{session}/end", json={"reward": 1})).status_code == 409
        assert (await it.http.get(f"{session}/exchanges")).json() == []
        assert (await it.http.get(f"{session}/trajectory")).json()["traces"] == []

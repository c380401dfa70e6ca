"""Evidence of tampering at the server: told by a node, kept, counted, shown to trainers, and filtered by."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from polar.node.finished_session import FinishedSession
from polar.node.worker import _fill_outcome
from polar.records.result import SessionResult
from polar.records.session import Evidence, Session, Verdict
from polar.rollout import result_pages
from polar.rollout.protocol import SessionOutcome
from polar.store.sqlite import open_sqlite_store
from polar.telemetry.service_metrics import ServiceMetrics
from tests.unit.rollout.served import NODE, Served, page_of, served, task

PROVEN = Evidence("link_out", "out.txt -> /tests/expected.txt", True, "it leads out of the workspace")
UNPROVEN = Evidence("grader_path", "/tests", count=3)


async def run_some(it: Served, *kinds: list[Evidence]) -> list[str]:
    """A session for each, in that order."""
    await it.submit(task(num_samples=len(kinds)))
    await it.join()
    leases = sorted(await it.work(), key=lambda lease: lease.sample)
    return [await it.run(lease, reward=0.0, evidence=evidence) for lease, evidence in zip(leases, kinds, strict=True)]


async def feed(it: Served, **params: Any) -> tuple[list[dict[str, Any]], int]:
    return page_of(await it.http.get("/rollout/results", params=params))


async def test_from_a_node_with_a_store_of_its_own_to_a_trainer(tmp_path: Path) -> None:
    """Over HTTP, as a node elsewhere does it."""
    verdict = Verdict(0.0, detail={"unadjusted_reward": 1.0}, evidence=[PROVEN, UNPROVEN])
    store = open_sqlite_store(tmp_path / "node.db")
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.join()
        (lease,) = await it.work()
        await store.create_session(Session("s", b"s", 1.0, metadata={"task_id": "t"}))
        await store.end_session("s", ended_at=2.0, verdict=verdict)
        sent = await it.http.put(f"/nodes/{NODE}/sessions", content=await store.export_session("s"))
        assert sent.status_code == 200, sent.text
        ended = _fill_outcome(
            SessionOutcome(lease.work_id, lease.fence, None),
            FinishedSession("s", "t", 0, verdict, {}, tmp_path),
            cancelled=None,
        )
        told = await it.http.post(f"/nodes/{NODE}/finish", content=msgspec.json.encode([ended]))
        assert told.json() == ["taken"]
        (document,), _ = await feed(it)
        result = SessionResult.model_validate(document)
        shown = (await it.http.get("/sessions/s")).json()
        listed = (await it.http.get("/sessions")).json()
        status = (await it.http.get("/rollout/task/t")).json()
    await store.close()
    expected = msgspec.to_builtins([PROVEN, UNPROVEN])
    assert [one.model_dump() for one in result.evidence] == expected
    assert (result.reward, result.metadata["suspicious"]) == (0.0, True)
    assert result.metadata["verdict"] == {"unadjusted_reward": 1.0}
    assert listed == [shown]
    assert (shown["evidence"], shown["suspicious"]) == (expected, True)
    assert status["results"][0]["evidence"] == expected


@pytest.mark.parametrize("change", [{"kind": "magic"}, {"count": 0}, {"count": -3}])
async def test_evidence_that_none_can_have_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.join()
        (lease,) = await it.work()
        ended = msgspec.to_builtins(SessionOutcome(lease.work_id, lease.fence, None, reason="x", evidence=[PROVEN]))
        ended["evidence"][0] |= change
        answer = await it.http.post(f"/nodes/{NODE}/finish", json=[ended])
        assert answer.status_code in (400, 422), answer.text


async def test_results_are_filtered(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        ids = await run_some(it, [], [PROVEN], [UNPROVEN], [UNPROVEN, PROVEN], [])
        _, last = await feed(it)
        for wanted, places in (("keep", [0, 1, 2, 3, 4]), ("only", [1, 3]), ("exclude", [0, 2, 4])):
            results, cursor = await feed(it, suspicious=wanted)
            assert [result["session_id"] for result in results] == [ids[place] for place in places]
            assert cursor == last  # though the last ones may not pass
            seen, after = [], 0
            while True:  # page by page, of which some have none that pass
                results, after = await feed(it, suspicious=wanted, limit=1, after=after)
                if not results:
                    break
                seen += [result["session_id"] for result in results]
            assert seen == [ids[place] for place in places]
            (group,), _ = await feed(it, suspicious=wanted, unit="group")
            assert [result["session_id"] for result in group["results"]] == [ids[place] for place in places]
            assert (group["asked"], group["usable"]) == (5, 5)
        answer: httpx.Response = await it.http.get("/rollout/results", params={"suspicious": "none"})
        assert answer.status_code == 422


async def test_a_page_that_is_cut_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as it:
        ids = await run_some(it, [PROVEN], [], [PROVEN], [])
        monkeypatch.setattr(result_pages, "MAX_PAGE_BYTES", 1)
        results, cursor = await feed(it, suspicious="only")
        assert [result["session_id"] for result in results] == [ids[0]]
        results, cursor = await feed(it, suspicious="only", after=cursor)
        assert [result["session_id"] for result in results] == [ids[2]]


async def test_evidence_is_counted_and_told_of(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with served(tmp_path) as it:
        it.rollout.ledger.metrics = ServiceMetrics(registry, queue=lambda: {}, nodes=lambda: [], callbacks=lambda: 0)
        listener = it.rollout.events.subscribe()
        await run_some(it, [PROVEN, UNPROVEN], [UNPROVEN], [])
        it.rollout.events.close()
        ended = [event.fields async for event in listener if event.kind == "session.ended"]
    assert [(one["suspicious"], one["evidence"]) for one in ended] == [(True, 4), (False, 3), (False, 0)]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"run": "default", **labels})

    assert value("polar_tampering_evidence_total", kind="link_out", proven="true") == 1
    assert value("polar_tampering_evidence_total", kind="grader_path", proven="false") == 6
    assert value("polar_sessions_suspicious_total") == 1

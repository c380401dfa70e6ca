"""Nothing leaves the service unverified: damaged rows, and what a builder got wrong, are held back on every way out."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from polar.records.trajectory import Trajectory, TreeTrajectory
from polar.trajectory import checker
from polar.trajectory import session as sessions
from tests.unit.rollout.served import Served, page_of, served, task
from tests.unit.rollout.test_callbacks import receiving

TURNS = 3


# Every way out


async def ways_out(it: Served) -> dict[str, Any]:
    """What each way hands out of task `t`, by its name: results, and then trees."""
    results, _ = page_of(await it.http.get("/rollout/results"))
    groups, _ = page_of(await it.http.get("/rollout/results", params={"unit": "group", "builder": "per_request"}))
    status = (await it.http.get("/rollout/task/t")).json()
    return {
        "page": results,
        "group": groups[0]["results"],
        "status": status["results"],
        "usable in the group": groups[0]["usable"],
        "usable in the status": status["usable_sessions"],
        "trajectory": [
            (await it.http.get(f"/sessions/{it_['session_id']}/trajectory", params={"builder": builder})).json()
            for it_ in results
            for builder in ("prefix_merging", "per_request")
        ],
        "tree": (await it.http.get("/rollout/task/t/trajectory")).json(),
        "tree of one": (await it.http.get("/sessions/s-t-0/trajectory", params={"builder": "prefix_tree"})).json(),
    }


def check_held(out: dict[str, Any], reason: str, *kinds: str) -> None:
    """Session s-t-0 is held back everywhere, in the same words; s-t-1 is handed on."""
    for way in ("page", "group", "status"):
        held, sound = sorted(out[way], key=lambda result: str(result["session_id"]))
        assert (held["session_id"], held["status"], held["reward"], held["reason"]) == (
            "s-t-0",
            "ERROR",
            None,
            reason,
        ), way
        assert held["trajectory"]["traces"] == []
        assert "s-t-0" in held["error"]
        assert "polar verify s-t-0" in held["error"]
        assert any(kind in held["error"] for kind in kinds), held["error"]
        assert (sound["status"], sound["reward"], bool(sound["trajectory"]["traces"])) == ("COMPLETED", 1.0, True), way
    assert (out["usable in the group"], out["usable in the status"]) == (1, 1)
    for document in out["trajectory"]:
        if document["metadata"]["session_id"] == "s-t-0":
            assert (document["status"], document["traces"]) == ("ERROR", [])
            assert (document["metadata"]["reward"], document["metadata"]["reason"]) == (None, reason)
        else:
            assert document["traces"]


def check_trees_held(out: dict[str, Any], reason: str) -> None:
    for tree in (out["tree"], out["tree of one"]):
        told = {one["session_id"]: (one["reward"], one["reason"]) for one in tree["sessions"]}
        assert told["s-t-0"] == (None, reason)
        assert not any(term["session_id"] == "s-t-0" for term in tree["terms"])
    assert out["tree of one"]["nodes"] == []


@contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    def flip(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    def bump(data: bytes) -> bytes:
        """Another token, and a valid one."""
        return bytes([data[0] ^ 1]) + data[1:]

    with closing(sqlite3.connect(folder / "polar.db", isolation_level=None)) as db:
        db.create_function("flip", 1, flip)
        db.create_function("bump", 1, bump)
        yield db


FIRST = "session_id = 's-t-0' AND seq = 1"
ROWS = {
    "a sampled token": (f"UPDATE exchanges SET sampled = bump(sampled) WHERE {FIRST}", "checksum"),
    "a prompt's token": (f"UPDATE exchanges SET prompt = bump(prompt) WHERE {FIRST}", "checksum"),
    "a log-probability": (f"UPDATE exchanges SET logprobs = bump(logprobs) WHERE {FIRST}", "checksum"),
    "a version": (f"UPDATE exchanges SET detail = replace(detail, '[[4,', '[[5,') WHERE {FIRST}", "checksum"),
    "more delivered than sampled": (f"UPDATE exchanges SET delivered = 99 WHERE {FIRST}", "delivered"),
    "a parent": (f"UPDATE exchanges SET parent = 'nobody' WHERE {FIRST}", "parent"),
    "a doubled sampling": (
        "UPDATE exchanges SET exchange_id = 'other', sampled = (SELECT sampled FROM exchanges WHERE session_id = "
        f"'s-t-0' AND seq = 0) WHERE {FIRST}",
        "checksum",
    ),
    "a removed checksum": (f"UPDATE exchanges SET checksum = NULL WHERE {FIRST}", "checksum"),
}


@pytest.mark.parametrize("name", ROWS)
async def test_damaged_rows_are_held_back_on_every_way_out(tmp_path: Path, name: str) -> None:
    statement, kind = ROWS[name]
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        with database(tmp_path) as db:
            assert db.execute(statement).rowcount == 1
        out = await ways_out(it)
        check_held(out, "verify_failed", kind)
        check_trees_held(out, "verify_failed")
        assert {term["session_id"] for term in out["tree"]["terms"]} == {"s-t-1"}  # the group goes on without it


# Builders that make a mistake


def shift_mask(built: Trajectory) -> None:
    for trace in built.traces:
        trace.loss_mask = np.append(np.uint8(0), trace.loss_mask[:-1])


def drop_token(built: Trajectory) -> None:
    trace = built.traces[-1]
    trace.response_ids = np.delete(trace.response_ids, 0)
    trace.loss_mask = np.delete(trace.loss_mask, 0)
    trace.policy_versions = np.delete(trace.policy_versions, 0)
    assert trace.logprobs is not None
    trace.logprobs = np.delete(trace.logprobs, 0)


def drop_context(built: Trajectory) -> None:
    built.traces[-1].prompt_ids = built.traces[-1].prompt_ids[1:]


def double_trace(built: Trajectory) -> None:
    built.traces.append(built.traces[0])


def lose_trace(built: Trajectory) -> None:
    built.traces.pop()


def change_weight(built: Trajectory) -> None:
    built.traces[0].weight *= 1.01


def shift_logprobs(built: Trajectory) -> None:
    for trace in built.traces:
        assert trace.logprobs is not None
        trace.logprobs = np.roll(trace.logprobs, 1)


def change_version(built: Trajectory) -> None:
    built.traces[0].policy_versions = built.traces[0].policy_versions + 1


def move_span(built: Trajectory) -> None:
    first, *rest = built.traces[0].spans
    built.traces[0].spans = [msgspec.structs.replace(first, offset=first.offset + 1), *rest]


def change_reward(built: Trajectory) -> None:
    built.traces[0].reward = 0.5


TRACES: dict[Callable[[Trajectory], None], tuple[str, ...]] = {
    shift_mask: (": mask:",),
    drop_token: (": token:", ": structure:"),
    drop_context: (": context:",),
    double_trace: (": twice:",),
    lose_trace: (": lost:",),
    change_weight: (": weight:",),
    shift_logprobs: (": logprob:",),
    change_version: (": version:",),
    move_span: (": structure:",),
    change_reward: (": reward:",),
}
"""What is wrong, and the kind of the first problem."""


@pytest.mark.parametrize("mistake", TRACES, ids=lambda mistake: mistake.__name__)
async def test_a_builders_mistakes_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Trajectory], None]
) -> None:
    def wrong(paths: Any, builder: str) -> Trajectory:
        built = run_builder(paths, builder)
        if paths.session_id == "s-t-0":
            mistake(built)
        return built

    run_builder = sessions.run_builder
    monkeypatch.setattr(sessions, "run_builder", wrong)
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        out = await ways_out(it)
        check_held(out, "verify_failed", *TRACES[mistake])


def shift_term(tree: TreeTrajectory) -> None:
    tree.terms[0].offset += 1


def double_term(tree: TreeTrajectory) -> None:
    tree.terms.append(tree.terms[0])


def lose_term(tree: TreeTrajectory) -> None:
    tree.terms.pop()


def change_id(tree: TreeTrajectory) -> None:
    tree.ids = tree.ids.copy()
    tree.ids[0] += 1


def change_parent(tree: TreeTrajectory) -> None:
    tree.parents = tree.parents + 1


def change_term_weight(tree: TreeTrajectory) -> None:
    tree.terms[0].weight *= 1.01


TREES = [shift_term, double_term, lose_term, change_id, change_parent, change_term_weight]


@pytest.mark.parametrize("mistake", TREES, ids=lambda mistake: mistake.__name__)
async def test_a_tree_with_a_mistake_is_held_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[TreeTrajectory], None]
) -> None:
    def load_plugin(kind: str, name: str) -> Any:
        build = found(kind, name)
        if name != "prefix_tree":
            return build

        def wrong(paths: Any) -> TreeTrajectory:
            tree: TreeTrajectory = build(paths)
            if tree.terms:
                mistake(tree)
            return tree

        return wrong

    found = sessions.load_plugin  # type: ignore[attr-defined]
    monkeypatch.setattr(sessions, "load_plugin", load_plugin)
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        for tree in (
            (await it.http.get("/rollout/task/t/trajectory")).json(),
            (await it.http.get("/sessions/s-t-0/trajectory", params={"builder": "prefix_tree"})).json(),
        ):
            assert (tree["nodes"], tree["terms"]) == ([], [])
            assert {(one["reward"], one["reason"]) for one in tree["sessions"]} == {(None, "verify_failed")}


async def test_callbacks_tell_that_a_session_is_held_back(tmp_path: Path) -> None:
    async with receiving() as receiver, served(tmp_path) as it:
        await it.submit(task(num_samples=2, callback_url=f"{receiver.url}/ended"))
        await it.join()
        first, second = await it.work()
        await it.run(first, turns=TURNS)
        with database(tmp_path) as db:
            db.execute(ROWS["a sampled token"][0])
        await it.run(second, turns=TURNS)
        ((_, _, told),) = await receiver.got(1)
    held, sound = sorted(told["results"], key=lambda result: str(result["session_id"]))
    assert (held["reward"], held["reason"], held["trajectory"]["traces"]) == (None, "verify_failed", [])
    assert (sound["reward"], told["usable_sessions"]) == (1.0, 1)


# The check itself


@pytest.mark.parametrize("step", ["check_records", "RecordedSession"])
async def test_a_check_that_fails_holds_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def broken(*args: Any, **others: Any) -> Any:
        (first, *_) = exchanges = args[0 if step == "check_records" else 1]
        if exchanges and first.session_id == "s-t-0":
            raise ZeroDivisionError("oh")
        return run(*args, **others)

    run = getattr(checker, step)
    monkeypatch.setattr(checker, step, broken)
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        out = await ways_out(it)
        check_held(out, "verify_error", "ZeroDivisionError")
        check_trees_held(out, "verify_error")
        assert 'polar_verified_sessions_total{result="verify_error"}' in (await it.http.get("/metrics")).text


async def test_checks_are_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        await it.http.get("/rollout/results")
        with database(tmp_path) as db:
            db.execute(ROWS["a log-probability"][0])
        await it.http.get("/rollout/results")
        counts = metrics_of((await it.http.get("/metrics")).text)
        assert counts['polar_verified_sessions_total{result="passed"}'] == 3
        assert counts['polar_verified_sessions_total{result="verify_failed"}'] == 1
        assert counts['polar_verified_sessions_total{result="skipped"}'] == 0
        assert counts['polar_verify_problems_total{kind="checksum"}'] == 1
        assert counts["polar_verify_cpu_seconds_total"] > 0


async def test_a_share_of_nothing_checks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was compared")

    for step in ("check_records", "RecordedSession", "check_trajectory", "check_tree"):
        monkeypatch.setattr(checker, step, never)
    async with served(tmp_path, verify_share=0) as it:
        await it.submit(task(num_samples=2))
        await it.run_all(turns=TURNS)
        with database(tmp_path) as db:
            db.execute(ROWS["a log-probability"][0])
        results, _ = page_of(await it.http.get("/rollout/results"))
        assert [result["reward"] for result in results] == [1.0, 1.0]
        counts = metrics_of((await it.http.get("/metrics")).text)
        assert counts['polar_verified_sessions_total{result="skipped"}'] == 2
        assert counts['polar_verified_sessions_total{result="passed"}'] == 0
        assert counts["polar_verify_cpu_seconds_total"] == 0


def test_a_share_is_the_same_for_everybody_and_grows() -> None:
    names = [f"s{number}" for number in range(2000)]
    few = {name for name in names if checker.is_in_checked_share(name, 0.1)}
    assert few == {name for name in names if checker.is_in_checked_share(name, 0.1)}
    assert few < {name for name in names if checker.is_in_checked_share(name, 0.5)}
    assert 120 < len(few) < 280
    assert not any(checker.is_in_checked_share(name, 0) for name in names)
    assert all(checker.is_in_checked_share(name, 1) for name in names)


def metrics_of(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

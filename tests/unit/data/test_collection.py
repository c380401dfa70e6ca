"""Which sessions a collection still needs: after results of every kind, and after any stop."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config import PriceSettings
from polar.data.collection import Budget, Collection, lock_collection
from polar.errors import ConfigError
from polar.node.finished_session import FinishedSession
from polar.node.task_plan import TaskPlan
from polar.records.sample import add_task_key, sample_key
from polar.records.session import Session, Verdict
from polar.records.task import TaskRequest
from polar.store.base import Store
from polar.types import Usage, UsageTotals


def plan(name: str, samples: int = 3, source: str = "set.jsonl", **fields: Any) -> TaskPlan:
    task = TaskRequest(task_id=name, instruction=f"Do {name}.", num_samples=samples, **fields)
    return TaskPlan(add_task_key(task, source), *[None] * 7)


class Data:
    """Sessions as a store keeps them, and what they used."""

    def __init__(self) -> None:
        self.kept: list[Session] = []
        self.each = UsageTotals(prompt=90, sampled=10)

    def begin(self, taken: tuple[TaskPlan, int]) -> Session:
        wanted, sample = taken
        name = f"s{len(self.kept)}"
        metadata = {**wanted.task.metadata, "task_id": wanted.task.task_id, "sample": sample}
        self.kept.append(Session(name, b"", float(len(self.kept)), metadata=metadata))
        return self.kept[-1]

    def end(self, session: Session, verdict: Verdict) -> FinishedSession:
        session.status, session.reward, session.reason = "ended", verdict.reward, verdict.reason
        metadata = session.metadata
        return FinishedSession(session.session_id, metadata["task_id"], metadata["sample"], verdict, {}, Path())

    async def list_sessions(self, *, limit: int, before: str | None) -> list[Session]:
        assert limit
        return list(reversed(self.kept)) if before is None else []

    async def read_usage_totals(self, session_id: str) -> UsageTotals:
        assert session_id
        return self.each

    def resumed(self, plans: list[TaskPlan], used: UsageTotals | None = None, **wish: Any) -> Collection:
        made = Collection(plans, lambda: used or UsageTotals(), **wish)
        asyncio.run(made.resume(cast(Store, self)))
        return made


def run(collection: Collection, data: Data, rewards: dict[tuple[str, int], Verdict]) -> list[tuple[str, int]]:
    """One session after the other; those that were run."""
    order = []
    while (taken := collection.next_sample()) is not None:
        name = taken[0].task.task_id, taken[1]
        order.append(name)
        collection.record_finished(data.end(data.begin(taken), rewards.get(name, Verdict(0.0))))
    return order


def test_all_samples_the_urgent_ones_first() -> None:
    plans = [plan("a", 2), plan("b", 1, dispatch_priority=5)]
    collection = Collection(plans, UsageTotals)
    assert collection.num_left == 3
    assert run(collection, Data(), {}) == [("b", 0), ("a", 0), ("a", 1)]
    assert (collection.num_left, collection.num_unsettled) == (0, 0)


def test_a_task_gets_another_try_until_one_is_accepted() -> None:
    data = Data()
    collection = Collection([plan("a", 4), plan("b", 2)], UsageTotals, min_reward=0.5)
    first = collection.next_sample()
    assert first is not None
    other = collection.next_sample()
    assert other is not None
    assert [first[0].task.task_id, other[0].task.task_id] == ["a", "b"]
    assert collection.next_sample() is None  # each task's next try depends on this one
    collection.record_finished(data.end(data.begin(first), Verdict(0.4)))
    collection.record_finished(data.end(data.begin(other), Verdict(0.0)))
    assert run(collection, data, {("a", 1): Verdict(0.5)}) == [("a", 1), ("b", 1)]
    rates = collection.stats_by_source["set.jsonl"]
    assert (len(rates.tasks), rates.solved, rates.sessions, rates.accepted) == (2, {"a"}, 4, 1)


def test_what_has_an_outcome_is_not_run_again() -> None:
    data = Data()
    plans = [plan("a", 8)]
    verdicts = [
        Verdict(1.0),
        Verdict(reason="node_lost"),
        Verdict(),  # nobody evaluates it
        Verdict(reason="timeout"),  # its task says so
        Verdict(reason="cancelled"),
        Verdict(reason="engine_failed"),
        Verdict(reason="suspicious"),  # likewise
    ]
    for sample, verdict in enumerate(verdicts):
        data.end(data.begin((plans[0], sample)), verdict)
    data.begin((plans[0], 7))  # its process died
    collection = data.resumed(plans)
    assert (collection.num_resumed, collection.num_left) == (4, 4)
    assert run(collection, data, {}) == [("a", 1), ("a", 4), ("a", 5), ("a", 7)]


def test_another_task_of_the_same_name_is_not_taken_for_it() -> None:
    data = Data()
    data.end(data.begin((plan("a", 1), 0)), Verdict(1.0))
    assert data.resumed([plan("a", 1)]).num_left == 0
    assert data.resumed([plan("a", 1, metadata={"note": "new"}, dispatch_priority=2)]).num_left == 0
    assert data.resumed([plan("a", 1, timeout_seconds=5)]).num_left == 1
    assert data.resumed([plan("a", 1, suspicious="keep")]).num_left == 1
    assert data.resumed([plan("a", 1, agent={"harness": "pi"})]).num_left == 1


@pytest.mark.parametrize("reason", ["harness_failed", "prepare_failed", "grader_failed", "timeout", "cancelled"])
def test_what_the_platform_did_not_fail_is_not_tried_again(reason: str) -> None:
    data = Data()
    collection = Collection([plan("a", 1)], UsageTotals, max_attempts=3)
    taken = collection.next_sample()
    assert taken is not None
    assert collection.record_finished(data.end(data.begin(taken), Verdict(reason=reason)))
    assert collection.num_left == 0


def test_what_the_platform_failed_is_tried_again_after_a_while_and_not_for_ever() -> None:
    now = [0.0]
    data = Data()
    collection = Collection([plan("a", 1)], UsageTotals, max_attempts=3, clock=lambda: now[0])
    heard = []
    for reason in ("engine_failed", "sandbox_failed", "store_failed"):
        taken = collection.next_sample()
        assert taken is not None
        heard.append(collection.record_finished(data.end(data.begin(taken), Verdict(reason=reason))))
        assert collection.next_sample() is None  # not at once
        now[0] += 1000
    assert heard == [False, False, True]  # the last one stands
    assert collection.next_sample() is None
    assert collection.num_left == 0


def test_a_budget_counts_what_earlier_runs_used() -> None:
    data = Data()
    plans = [plan("a", 5)]
    for sample, verdict in enumerate([Verdict(1.0), Verdict(reason="node_lost")]):
        data.end(data.begin((plans[0], sample)), verdict)
    assert data.resumed(plans, budget=Budget(tokens=201)).next_sample() is not None
    stopped = data.resumed(plans, budget=Budget(tokens=200))
    assert stopped.next_sample() is None
    assert (stopped.exhausted_limit, stopped.num_left, stopped.num_unsettled) == ("200 tokens", 0, 4)
    used = UsageTotals(prompt=1000, cached=400, sampled=100)
    price = PriceSettings(prompt=2.0, sampled=10.0, cached=0.5)
    # 780 new tokens, 400 cached ones and 120 sampled: 1560 + 200 + 1200 millionths
    assert data.resumed(plans, used, budget=Budget(cost=0.00297, price=price)).next_sample() is not None
    assert data.resumed(plans, used, budget=Budget(cost=0.00296, price=price)).next_sample() is None


def test_a_budget_of_seconds_is_of_this_run() -> None:
    now = [50.0]
    collection = Collection([plan("a")], UsageTotals, budget=Budget(seconds=10), max_running=2, clock=lambda: now[0])
    assert collection.next_sample() is not None
    now[0] += 10
    assert collection.next_sample() is None
    assert collection.exhausted_limit == "10 seconds"


def test_a_budget_that_nobody_can_keep_is_an_error() -> None:
    used = UsageTotals()
    used.add(Usage(), answered=False)  # a call that failed
    collection = Collection([plan("a")], lambda: used, budget=Budget(tokens=10), max_running=2)
    assert collection.next_sample() is not None
    used.add(Usage(), answered=True)
    with pytest.raises(ConfigError, match="does not tell how many tokens"):
        collection.next_sample()
    with pytest.raises(ConfigError, match="--price"):
        Budget(cost=1.0)


def test_with_a_budget_no_more_begin_than_run_at_once() -> None:
    data = Data()
    collection = Collection([plan("a", 5)], UsageTotals, budget=Budget(tokens=10), max_running=2)
    first = collection.next_sample()
    assert first is not None
    assert collection.next_sample() is not None
    assert collection.next_sample() is None
    collection.record_finished(data.end(data.begin(first), Verdict(1.0)))
    assert collection.next_sample() is not None


REWARDS = st.sampled_from([Verdict(0.0), Verdict(0.3), Verdict(1.0), Verdict(reason="timeout")])


@given(
    outcomes=st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=1, max_size=4),
    accept=st.sampled_from([None, 0.2, 1.0]),
    kills=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=4),
)
def test_stops_change_nothing(
    outcomes: list[list[Verdict]], accept: float | None, kills: list[tuple[int, int]]
) -> None:
    """However often it is killed, and whatever runs then: in the end the same samples have an outcome, each once."""
    plans = [plan(f"t{number}", len(verdicts)) for number, verdicts in enumerate(outcomes)]
    told = {
        (f"t{n}", sample): verdict for n, verdicts in enumerate(outcomes) for sample, verdict in enumerate(verdicts)
    }

    def settled(data: Data) -> list[Any]:
        ended = [one for one in data.kept if one.status == "ended" and one.reason != "node_lost"]
        return sorted((str(sample_key(one)), one.reward) for one in ended)

    whole, stopped = Data(), Data()
    run(whole.resumed(plans, min_reward=accept), whole, told)
    for sessions, running in kills:
        collection = stopped.resumed(plans, min_reward=accept)
        begun: list[Session] = []
        for _ in range(sessions):
            if (taken := collection.next_sample()) is not None:
                begun.append(stopped.begin(taken))
            if len(begun) > running:
                session = begun.pop(0)
                verdict = told[session.metadata["task_id"], session.metadata["sample"]]
                collection.record_finished(stopped.end(session, verdict))
        for session in begun:
            stopped.end(session, Verdict(reason="node_lost"))
    run(stopped.resumed(plans, min_reward=accept), stopped, told)
    assert settled(stopped) == settled(whole)


def test_what_was_cancelled_is_in_no_rate() -> None:
    collection, data = Collection([plan("a", 2)], UsageTotals), Data()
    run(collection, data, {("a", 0): Verdict(1.0), ("a", 1): Verdict(reason="cancelled")})
    assert [(rates.sessions, rates.accepted) for rates in collection.stats_by_source.values()] == [(1, 1)]


def test_one_collection_at_a_time(tmp_path: Path) -> None:
    with lock_collection(tmp_path / "data"):
        with (
            pytest.raises(ConfigError, match="Another `polar run --resume` is at work"),
            lock_collection(tmp_path / "data"),
        ):
            pass
        with lock_collection(tmp_path / "other"):
            pass
    with lock_collection(tmp_path / "data"):
        pass

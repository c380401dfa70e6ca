"""The server as nodes see it, with nodes that the tests play."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from polar.config import ServerSettings
from polar.engines.base import DesiredEngines
from polar.errors import ConfigError, EngineError
from polar.records.task import TaskRequest
from polar.rollout.engine_controller import NotAppliedYet
from polar.rollout.protocol import Heartbeat, JoinRequest, Lease, SessionOutcome, UnknownNode
from polar.rollout.runs import Quotas
from polar.rollout.service import RolloutService
from polar.store.relational import RelationalStore
from tests.conditions import wait_until

SETTINGS = ServerSettings(lease_seconds=60, beat_seconds=0.05)
ENGINE = "http://engine:1"


@asynccontextmanager
async def rollout_on(store: RelationalStore, settings: ServerSettings = SETTINGS) -> AsyncIterator[RolloutService]:
    async with RolloutService(
        store, settings, store_id="here", replicas=[ENGINE], versions=store.read_policy_versions
    ) as rollout:
        yield rollout


@pytest.fixture
async def rollout(store: RelationalStore) -> AsyncIterator[RolloutService]:
    async with rollout_on(store) as it:
        yield it


class Node:
    """Beats, and puts in force whatever it hears of, unless it is told not to."""

    def __init__(self, rollout: RolloutService, node_id: str, *, backends: tuple[str, ...] = ("local",)) -> None:
        self.rollout = rollout
        self.node_id = node_id
        self.backends = backends
        self.heard: list[DesiredEngines] = []
        self.problems: dict[str, list[str]] = {}
        self.stuck = False  # it hears, and gets nothing done
        self._beating: asyncio.Task[None]

    async def __aenter__(self) -> "Node":
        joining = JoinRequest(self.node_id, self.node_id, list(self.backends), 4, "here")
        joined = await self.rollout.lease_manager.join(joining)
        self.heard.append(joined.engines)
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()
        await asyncio.wait({self._beating})

    async def _beat(self) -> None:
        while True:
            seen = self.heard[-1].generation
            beat = Heartbeat([], seen=seen, applied=-1 if self.stuck else seen, problems=self.problems)
            orders = await self.rollout.lease_manager.heartbeat(self.node_id, beat)
            if orders.engines is not None:
                self.heard.append(orders.engines)
            await asyncio.sleep(0.005)

    async def lease(self, room: int = 10) -> list[Lease]:
        return await self.rollout.lease_manager.lease(self.node_id, [], room)

    async def end(self, lease: Lease, reason: str | None = None) -> None:
        ended = SessionOutcome(lease.work_id, lease.fence, None, None if reason else 1.0, reason)
        await self.rollout.lease_manager.finish(self.node_id, [ended])

    def modes(self) -> list[str | None]:
        return [engines.pools["default"].paused for engines in self.heard]


async def until(true: Callable[[], bool]) -> None:
    await wait_until(true)


def task(name: str = "t", **fields: object) -> TaskRequest:
    return TaskRequest.model_validate({"task_id": name, "instruction": "", "runtime": {"backend": "local"}, **fields})


async def test_a_pause_is_in_force_everywhere_when_it_is_answered(rollout: RolloutService) -> None:
    async with Node(rollout, "a") as a, Node(rollout, "b") as b:
        await rollout.engine_controller.pause("default", "hold", 60)
        assert a.modes()[-1] == b.modes()[-1] == "hold"
        b.stuck = True
        with pytest.raises(NotAppliedYet, match="b"):
            await rollout.engine_controller.resume("default", 0.2)


async def test_frozen_calls_hear_of_new_weights_before_the_first_engine_goes_on(rollout: RolloutService) -> None:
    async with Node(rollout, "a") as a:
        await rollout.engine_controller.pause("default", "freeze", 60)
        assert await rollout.engine_controller.set_version("default", 2, None, 60)
        await rollout.engine_controller.resume("default", 60)
        assert a.modes()[-4:] == ["freeze", "freeze", "settle", None]
        assert a.heard[-2].pools["default"].replicas[0].version == 2


async def test_one_node_sends_engines_to_sleep_when_no_call_runs_and_wakes_them_before_any_begins(
    rollout: RolloutService,
) -> None:
    async with Node(rollout, "own") as own, Node(rollout, "other") as other:
        rollout.lease_manager.sleep_node_id = "own"
        await rollout.engine_controller.pause("default", "sleep", 60)
        assert own.modes()[-2:] == ["drain", "sleep"]
        assert other.modes()[-2:] == ["drain", "hold"]
        await rollout.engine_controller.resume("default", 60)
        assert own.modes()[-2:] == ["hold", None]


async def test_who_pauses_or_resumes_last_has_the_last_word(rollout: RolloutService) -> None:
    async with Node(rollout, "a") as a:
        a.stuck = True
        sleeping = asyncio.create_task(rollout.engine_controller.pause("default", "sleep", 30))
        await until(lambda: a.modes()[-1] == "drain")
        a.stuck = False
        await rollout.engine_controller.resume("default", 60)
        with pytest.raises(NotAppliedYet, match="Another request"):
            await sleeping
        assert a.modes()[-1] is None


async def test_an_engine_that_does_not_obey_is_told_of_to_those_whose_it_is(rollout: RolloutService) -> None:
    async with Node(rollout, "a") as a:
        await rollout.engine_controller.add_replica("mine", "http://other:2", None, 60)
        a.problems = {"default": ["http://engine:1 does not answer."]}
        with pytest.raises(EngineError, match="does not answer"):
            await rollout.engine_controller.pause("default", "freeze", 60)
        await rollout.engine_controller.pause("mine", "hold", 60)
        with pytest.raises(ConfigError, match="an engine of the run mine"):
            await rollout.engine_controller.add_replica("default", "http://other:2/v1", None, 60)


async def test_a_node_that_only_the_database_knows_of_is_waited_for(store: RelationalStore) -> None:
    async with rollout_on(store) as rollout, Node(rollout, "a") as a:
        await rollout.submit([task()])
        assert len(await a.lease()) == 1
    async with rollout_on(store) as again:
        with pytest.raises(NotAppliedYet, match="a"):
            await again.engine_controller.set_version("default", 2, None, 0.1)
        async with Node(again, "a"):
            assert await again.engine_controller.set_version("default", 3, None, 60)


async def test_a_task_goes_to_a_node_that_can_run_it(rollout: RolloutService) -> None:
    await rollout.submit([task("x"), task("y")])
    async with Node(rollout, "without") as without, Node(rollout, "with") as other:
        (first,) = await without.lease(1)
        await without.end(first, "not_runnable")
        await asyncio.sleep(0)
        rollout.lease_manager._awaiting_retry.clear()
        await rollout.lease_manager._requeue(first.work_id)
        assert [lease.task_id for lease in await without.lease()] == ["y"]
        assert [lease.task_id for lease in await other.lease()] == [first.task_id]


async def test_a_silent_node_is_lost_and_has_to_join_again(store: RelationalStore) -> None:
    settings = ServerSettings(lease_seconds=3, beat_seconds=0.05)
    async with rollout_on(store, settings) as rollout:
        await rollout.submit([task()])
        async with Node(rollout, "a") as a:
            (lease,) = await a.lease()
        await until(lambda: not rollout.list_nodes())
        with pytest.raises(UnknownNode):
            await rollout.lease_manager.heartbeat("a", Heartbeat([lease.lease_id]))
        async with Node(rollout, "b") as b:
            (again,) = await b.lease()
            assert (again.work_id, again.fence) == (lease.work_id, lease.fence + 1)
            assert await rollout.lease_manager.finish("a", [SessionOutcome(lease.work_id, lease.fence, None, 1.0)]) == [
                "lost"
            ]


async def test_no_more_begins_than_the_trainer_can_take(rollout: RolloutService) -> None:
    await rollout.submit([task("g", num_samples=3), task("h", num_samples=9)])
    await rollout.set_quotas("default", Quotas(batch=2, max_lag=1))
    async with Node(rollout, "a") as a:
        held = await a.lease()
        assert len(held) == 4
        for lease in held:
            await a.end(lease)
        assert await a.lease() == []  # nobody has taken them
        groups = await rollout.list_groups_after("default", 0, 10)
        assert [group.task_id for group in groups] == ["g"]
        await rollout.update_consumer("default", "trainer", groups[0].cursor, "group")
        assert len(await a.lease()) == 3  # the fourth belongs to a group that has not ended: it is not taken
        await rollout.update_consumer("default", "a curious one", 0, "session")
        assert rollout.count_sessions()["default"]["untaken"] == 1


async def test_sessions_that_are_too_old_are_ended_or_marked(rollout: RolloutService) -> None:
    await rollout.submit([task("mark", max_lag=0), task("cancel", max_lag=0, on_stale="cancel")])
    async with Node(rollout, "a") as a:
        leases = {lease.task_id: lease for lease in await a.lease()}
        await rollout.engine_controller.set_version("default", 1, None, 60)
        orders = await rollout.lease_manager.heartbeat("a", Heartbeat([], seen=-2))
        assert [(cancel.held, cancel.reason) for cancel in orders.cancel] == [(leases["cancel"].lease_id, "stale")]
        for lease in leases.values():
            await a.end(lease)
        rows = {row.task_id: row.summary or "" for row in await rollout.list_sessions_after("default", 0, 10)}
        assert '"reason":null' in rows["mark"]
        assert '"stale":true' in rows["mark"]
        assert '"lag":1' in rows["mark"]
        assert '"reason":"stale"' in rows["cancel"]


async def kills_of(rollout: RolloutService, task_id: str = "t") -> int:
    return (await rollout.list_task_work("default", task_id))[0].kills


async def test_a_node_that_says_that_it_ends_gets_no_more_and_its_death_marks_nothing(rollout: RolloutService) -> None:
    await rollout.submit([task("t")])
    async with Node(rollout, "a") as a:
        (lease,) = await a.lease()
    await rollout.lease_manager.heartbeat("a", Heartbeat([], ending=True))
    assert [node.draining for node in rollout.list_nodes()] == [True]
    await rollout.submit([task("more")])
    assert await rollout.lease_manager.lease("a", [lease.lease_id], 10) == []
    await rollout.lease_manager.remove_member(rollout.lease_manager.members["a"], died=True)
    assert await kills_of(rollout) == 0


async def test_a_node_that_was_stopped_marks_nothing_whoever_says_so(rollout: RolloutService) -> None:
    """It was killed before the server heard of its end; the next one on its folder finds a note of it."""
    await rollout.submit([task("t")])
    async with Node(rollout, "a") as a:
        await a.lease()
    await rollout.lease_manager.join(JoinRequest("b", "b", ["local"], 4, "here", replaces=["a"], stopped=["a"]))
    assert await kills_of(rollout) == 0


async def test_a_node_that_comes_back_had_not_died(rollout: RolloutService) -> None:
    await rollout.submit([task("t")])
    async with Node(rollout, "a") as a:
        await a.lease()
    await rollout.lease_manager.remove_member(rollout.lease_manager.members["a"], died=True)
    assert await kills_of(rollout) == 1
    await rollout.lease_manager.join(JoinRequest("a", "a", ["local"], 4, "here"))
    assert await kills_of(rollout) == 0


async def test_one_node_of_a_lane_is_kept_free_for_what_runs_alone(rollout: RolloutService) -> None:
    await rollout.submit([task("t")])
    leasing = rollout.lease_manager
    async with Node(rollout, "b"), Node(rollout, "a"), Node(rollout, "0", backends=("docker",)):
        assert {
            name: [one.is_isolation_node for one in leasing._compute_allowances(leasing.members[name])] for name in "ab"
        } == {
            "a": [True],
            "b": [False],
        }
        await leasing.drain("a")
        assert [one.is_isolation_node for one in leasing._compute_allowances(leasing.members["b"])] == [True]

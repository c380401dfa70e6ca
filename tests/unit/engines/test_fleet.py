"""Engines by run, made to be as a document says."""

import asyncio

import pytest

from polar.config import EngineSettings
from polar.engines import fleet as module
from polar.engines.base import DesiredEngines, DesiredPool, DesiredReplica, EngineState
from polar.engines.fleet import EngineFleet
from polar.engines.pool import EnginePool
from polar.engines.run_model import RunModel
from polar.errors import EngineError
from polar.records.policy import PauseState
from tests.unit.engines.fakes import (
    FakeCall,
    FakeEngine,
    make_engine_error,
    make_timeout_error,
    make_unreachable_error,
    run_event_loop,
)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda _group, _name: FakeEngine)


def state(*urls: str, version: int = 0, paused: PauseState | None = None) -> DesiredPool:
    return DesiredPool([DesiredReplica(url, version) for url in urls], paused)


def urls(pools: EngineFleet, run: str) -> list[str]:
    return sorted(replica.url for replica in pools.get_pool(run).replicas)


def engine(pools: EngineFleet, run: str = "default") -> FakeEngine:
    found = pools.get_pool(run).replicas[0].engine
    assert isinstance(found, FakeEngine)
    return found


async def test_runs_have_engines_of_their_own_or_those_of_default() -> None:
    pools = EngineFleet(EngineSettings())
    assert (
        await pools.apply(DesiredEngines(1, {"default": state("http://a", "http://b"), "mine": state("http://c")}))
        == {}
    )
    assert urls(pools, "mine") == ["http://c"]
    assert urls(pools, "yours") == urls(pools, "default") == ["http://a", "http://b"]
    assert set(pools.get_pools_by_run()) == {"default", "mine"}
    await pools.close()


async def test_the_same_document_changes_nothing() -> None:
    pools = EngineFleet(EngineSettings())
    document = DesiredEngines(
        1, {"default": state("http://a/v1/", version=3), "mine": state("http://c", paused="sleep")}
    )
    await pools.apply(document)
    before = {run: list(pool.replicas) for run, pool in pools.get_pools_by_run().items()}
    orders = list(engine(pools, "mine").orders)
    await pools.apply(document)
    assert {run: list(pool.replicas) for run, pool in pools.get_pools_by_run().items()} == before
    assert engine(pools, "mine").orders == orders == ["sleep"]
    assert before["default"][0].version == 3
    assert urls(pools, "default") == ["http://a"]


async def test_replicas_come_and_go_and_the_others_stay() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a", "http://b")}))
    stays = next(replica for replica in pools.default.replicas if replica.url == "http://b")
    await pools.apply(DesiredEngines(2, {"default": state("http://b", "http://c", version=4)}))
    assert urls(pools, "default") == ["http://b", "http://c"]
    assert stays in pools.default.replicas
    assert [replica.version for replica in pools.default.replicas] == [4, 4]


async def test_what_is_older_is_not_heard() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(5, {"default": state("http://a")}))
    await pools.apply(DesiredEngines(4, {"default": state("http://b", paused="hold")}))
    assert urls(pools, "default") == ["http://a"]
    assert not pools.default.gate.paused


async def test_another_server_counts_anew() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(5, {"default": state("http://a")}, "old"))
    await pools.apply(DesiredEngines(1, {"default": state("http://b")}, "new"))
    assert urls(pools, "default") == ["http://b"]
    await pools.apply(DesiredEngines(0, {"default": state("http://c")}, "new"))
    assert urls(pools, "default") == ["http://b"]


@pytest.mark.parametrize("before", ["freeze", "hold", "sleep", None])
@pytest.mark.parametrize("after", ["freeze", "hold", "sleep", None])
async def test_from_any_pause_to_any_other(before: PauseState | None, after: PauseState | None) -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a", paused=before)}))
    assert await pools.apply(DesiredEngines(2, {"default": state("http://a", paused=after)})) == {}
    (replica,) = pools.default.replicas
    assert pools.default.gate.paused == (after is not None)
    assert (replica.frozen, replica.asleep) == (after == "freeze", after == "sleep")
    assert pools.default.gate.frozen == (after == "freeze")


async def test_a_pool_that_comes_paused_lets_nobody_through() -> None:
    pools = EngineFleet(EngineSettings())
    applying = asyncio.create_task(pools.apply(DesiredEngines(1, {"default": state("http://a", paused="hold")})))
    await asyncio.sleep(0)
    call = FakeCall(pools.default)
    await applying
    await run_event_loop()
    assert pools.default.gate.held == 1
    await pools.apply(DesiredEngines(2, {"default": state("http://a")}))
    await call.done


async def test_frozen_calls_know_where_new_weights_begin() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a")}))
    engine(pools).ends.clear()
    call = FakeCall(pools.default)
    await run_event_loop()
    await pools.apply(DesiredEngines(2, {"default": state("http://a", paused="freeze")}))
    await pools.apply(DesiredEngines(3, {"default": state("http://a", version=1, paused="freeze")}))
    assert call.versions == []
    await pools.apply(DesiredEngines(4, {"default": state("http://a", version=1, paused="settle")}))
    assert call.versions == [(1, True)]
    assert engine(pools).switched == ["freeze", "freeze"]
    assert pools.default.replicas[0].frozen
    assert pools.default.gate.paused
    await pools.apply(DesiredEngines(5, {"default": state("http://a", version=1)}))
    assert call.versions == [(1, True)]
    assert engine(pools).switched == ["freeze", "freeze", "thaw"]
    engine(pools).ends.set()
    await call.done


@pytest.mark.parametrize("then", ["freeze", "settle"])
async def test_who_missed_a_thaw_does_not_guess(then: PauseState) -> None:
    """While this gateway was cut off, the others resumed, and froze again."""
    replica = [DesiredReplica("http://a", 3)]
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a")}))
    engine(pools).ends.clear()
    call = FakeCall(pools.default)
    await run_event_loop()
    await pools.apply(DesiredEngines(2, {"default": DesiredPool([DesiredReplica("http://a", 0)], "freeze", since=2)}))
    await pools.apply(DesiredEngines(7, {"default": DesiredPool(replica, then, since=5)}))
    await pools.apply(DesiredEngines(8, {"default": DesiredPool(replica, "settle", since=5)}))
    assert call.versions == [(3, False)]
    engine(pools).ends.set()
    await call.done


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("after", [None, "hold", "sleep"])
async def test_who_was_not_settled_does_not_guess(heard: bool, after: PauseState | None) -> None:
    """Another gateway may have let the engine go on before this one heard of it."""
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a")}))
    engine(pools).ends.clear()
    call = FakeCall(pools.default)
    await run_event_loop()
    await pools.apply(DesiredEngines(2, {"default": state("http://a", paused="freeze")}))
    if heard:  # of the new weights, but not that all others know of them
        await pools.apply(DesiredEngines(3, {"default": state("http://a", version=1, paused="freeze")}))
    applying = asyncio.create_task(
        pools.apply(DesiredEngines(5, {"default": state("http://a", version=1, paused=after)}))
    )
    await run_event_loop()
    assert call.versions == [(1, False)]
    engine(pools).ends.set()
    await call.done
    await applying


@pytest.mark.parametrize("paused", ["freeze", None])
async def test_who_hears_of_a_pause_too_late_does_not_guess(paused: PauseState | None) -> None:
    """The weights may have changed under calls that ran: they are told that the boundary is unknown."""
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a")}))
    engine(pools).ends.clear()
    call = FakeCall(pools.default)
    await run_event_loop()
    await pools.apply(DesiredEngines(4, {"default": state("http://a", version=1, paused=paused)}))
    assert call.versions == [(1, False)]
    engine(pools).ends.set()
    await call.done


async def test_one_failure_is_told_and_keeps_nothing_else_from_being_done() -> None:
    pools = EngineFleet(EngineSettings())
    both = {"default": state("http://a"), "mine": state("http://b")}
    await pools.apply(
        DesiredEngines(1, {run: state(pool.replicas[0].url, paused="freeze") for run, pool in both.items()})
    )
    engine(pools).failing["thaw"] = make_engine_error()
    assert await pools.apply(DesiredEngines(2, both)) == {"default": ["It is out of memory."]}
    assert engine(pools, "mine").switched == ["freeze", "thaw"]
    assert not pools.get_pool("mine").gate.paused
    engine(pools).failing.clear()
    assert await pools.apply(DesiredEngines(2, both)) == {}
    assert engine(pools).switched == ["freeze", "thaw", "thaw"]


async def test_an_engine_that_may_have_frozen_is_told_of_and_goes_on_with_the_others() -> None:
    pools = EngineFleet(EngineSettings())
    both = {"default": state("http://a"), "mine": state("http://b")}
    frozen = {run: state(pool.replicas[0].url, paused="freeze") for run, pool in both.items()}
    await pools.apply(DesiredEngines(1, both))
    engine(pools).failing["freeze"] = make_timeout_error()
    assert await pools.apply(DesiredEngines(2, frozen)) == {"default": ["It did not answer in time."]}
    assert engine(pools, "mine").switched == ["freeze"]
    assert pools.default.gate.paused
    assert not pools.default.gate.frozen
    assert await pools.apply(DesiredEngines(3, both)) == {}
    assert engine(pools).switched == ["freeze", "thaw"]


async def test_a_newer_document_ends_the_waiting_of_an_older_one() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a")}))
    engine(pools).ends.clear()
    call = FakeCall(pools.default)
    await run_event_loop()
    older = asyncio.create_task(pools.apply(DesiredEngines(2, {"default": state("http://a", paused="sleep")})))
    await run_event_loop()
    assert not older.done()
    await pools.apply(DesiredEngines(3, {"default": state("http://a")}))
    assert await older == {}
    assert not pools.default.gate.paused
    engine(pools).ends.set()
    await call.done
    assert engine(pools).switched == []


async def test_a_run_that_loses_its_engines_goes_on_with_those_of_default() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(DesiredEngines(1, {"default": state("http://a"), "mine": state("http://b")}))
    own = engine(pools, "mine")
    own.ends.clear()
    running = FakeCall(pools.get_pool("mine"))
    await run_event_loop()
    await pools.apply(DesiredEngines(2, {"default": state("http://a"), "mine": state("http://b", paused="hold")}))
    held = FakeCall(pools.get_pool("mine"))
    await run_event_loop()
    await pools.apply(DesiredEngines(3, {"default": state("http://a")}))
    with pytest.raises(EngineError, match="no engine"):
        await held.done
    await FakeCall(pools.get_pool("mine")).done
    assert engine(pools).calls == 1
    assert not own.closed
    own.ends.set()
    await running.done
    await run_event_loop()
    assert own.closed


async def test_closing_closes_every_engine() -> None:
    pools = EngineFleet(EngineSettings())
    await pools.apply(
        DesiredEngines(1, {"default": state("http://a"), "mine": state("http://b"), "theirs": state("http://c")})
    )
    engines = [engine(pools, run) for run in ("default", "mine", "theirs")]
    engines[2].ends.clear()
    call = FakeCall(pools.get_pool("theirs"))
    await run_event_loop()
    await pools.apply(DesiredEngines(2, {"default": state("http://a"), "mine": state("http://b")}))
    await pools.close()
    assert [one.closed for one in engines] == [True, True, True]
    engines[2].ends.set()
    await call.done


# Before the first document


async def waiting(*engines: FakeEngine) -> EngineFleet:
    pools = EngineFleet(EngineSettings(), EnginePool(engines, RunModel("default", EngineSettings())))
    await pools.start_held()
    return pools


async def test_until_somebody_says_how_engines_are_to_be_nothing_is_sampled() -> None:
    one = FakeEngine("http://a")
    one.capabilities.logprobs = "raw"  # so that a probe would be sampled
    pools = await waiting(one)
    call = FakeCall(pools.default)
    await run_event_loop()
    assert (one.orders, one.calls, pools.default.gate.held) == (["start"], 0, 1)
    await pools.apply(DesiredEngines(1, {"default": state("http://a", paused="freeze")}))
    await run_event_loop()
    assert (one.calls, one.switched) == (0, ["freeze"])
    await pools.apply(DesiredEngines(2, {"default": state("http://a")}))
    await call.done
    assert one.calls > 1  # it was met


async def test_until_somebody_says_so_no_run_has_the_engines_of_default() -> None:
    pools = await waiting(FakeEngine("http://a"))
    mine, yours = FakeCall(pools.get_pool("mine")), FakeCall(pools.get_pool("yours"))
    await run_event_loop()
    await pools.apply(DesiredEngines(1, {"default": state("http://a"), "mine": state("http://b")}))
    await mine.done
    assert mine.home is not None
    assert mine.home.url == "http://b"
    with pytest.raises(EngineError, match="no engine"):  # it finds those of default when it asks again
        await yours.done
    assert pools.get_pool("yours") is pools.default


@pytest.mark.parametrize(("stands", "told"), [("asleep", []), (None, []), ("running", ["sleep"])])
async def test_an_engine_that_another_process_sent_to_sleep_is_not_told_again(
    stands: EngineState | None, told: list[str]
) -> None:
    one = FakeEngine("http://a")
    one.stands = stands
    pools = await waiting(one)
    assert await pools.apply(DesiredEngines(1, {"default": state("http://a", paused="sleep")})) == {}
    assert one.switched == told
    assert pools.default.replicas[0].asleep
    call = FakeCall(pools.default)
    await pools.apply(DesiredEngines(2, {"default": state("http://a")}))
    await call.done
    assert one.switched == [*told, "wake"]


@pytest.mark.parametrize(("stands", "told"), [("asleep", ["wake"]), ("frozen", ["thaw"]), ("running", []), (None, [])])
@pytest.mark.parametrize("first", ["settle", None])
async def test_an_engine_that_another_process_left_standing_still_goes_on(
    first: PauseState | None, stands: EngineState | None, told: list[str]
) -> None:
    one = FakeEngine("http://a")
    one.stands = stands
    pools = await waiting(one)
    assert await pools.apply(DesiredEngines(1, {"default": state("http://a", paused=first)})) == {}
    assert await pools.apply(DesiredEngines(2, {"default": state("http://a")})) == {}
    assert one.switched == told
    await FakeCall(pools.default).done


async def test_who_only_holds_calls_wakes_no_engine() -> None:
    """It may be asleep on behalf of another gateway."""
    one = FakeEngine("http://a")
    one.stands = "asleep"
    pools = await waiting(one)
    await pools.apply(DesiredEngines(1, {"default": state("http://a", paused="hold")}))
    assert one.switched == []


async def test_an_engine_that_is_not_there_yet_keeps_no_document_from_being_in_force() -> None:
    one = FakeEngine("http://a")
    one.failing = {"start": make_unreachable_error(), "standing": make_unreachable_error()}
    pools = await waiting(one)
    assert await pools.apply(DesiredEngines(1, {"default": state("http://a")})) == {}
    one.failing.clear()
    await FakeCall(pools.default).done
    assert one.switched == []


async def test_an_engine_that_can_not_be_asked_now_is_asked_again_before_it_is_to_sleep() -> None:
    one = FakeEngine("http://a")
    one.stands, one.failing["standing"] = "asleep", make_timeout_error()
    pools = await waiting(one)
    document = DesiredEngines(1, {"default": state("http://a", paused="sleep")})
    assert await pools.apply(document) == {"default": ["It did not answer in time."]}
    one.failing.clear()
    assert await pools.apply(document) == {}
    assert one.switched == []

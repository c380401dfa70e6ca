"""Replicas that come and go under calls, engines that sleep, and calls that are held meanwhile."""

import asyncio

import pytest

from polar.config import EngineSettings
from polar.engines.pool import EnginePool
from polar.engines.run_model import RunModel
from polar.errors import EngineError
from tests.unit.engines.fakes import (
    REQUEST,
    FakeCall,
    FakeEngine,
    make_engine_error,
    make_timeout_error,
    make_unreachable_error,
    run_event_loop,
)


def pool_of(*engines: FakeEngine) -> EnginePool:
    return EnginePool(engines, RunModel("default", EngineSettings()))


# Replicas that come and go


async def test_a_replica_that_is_removed_ends_its_calls_and_gets_no_more() -> None:
    old, new = FakeEngine("http://old"), FakeEngine("http://new")
    pool = pool_of(old)
    old.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    home = pool.replicas[0]
    pool.add(new, version=3)
    pool.remove(home)
    later = FakeCall(pool, home=home)
    await later.done
    assert later.home is not None
    assert (later.home.url, later.home.version) == ("http://new", 3)
    assert old.calls == 1
    assert not old.closed
    assert pool.has_departing_replicas
    old.ends.set()
    await call.done
    await run_event_loop()
    assert call.ids == [1, 2]
    assert old.closed
    assert not pool.has_departing_replicas
    assert not new.closed


async def test_calls_at_a_frozen_replica_that_is_removed_go_on() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    await pool.pause()
    pool.remove(pool.replicas[0])
    await run_event_loop()
    assert engine.switched == ["freeze", "thaw"]
    engine.ends.set()
    await call.done
    assert call.ids == [1, 2]


async def test_closing_lets_go_of_replicas_that_were_removed_under_their_calls() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    pool.remove(pool.replicas[0])
    await run_event_loop()
    await pool.close()
    assert engine.closed
    engine.ends.set()
    await call.done


async def test_without_a_replica_calls_are_told_so() -> None:
    pool = pool_of()
    with pytest.raises(EngineError, match="no engine") as told:
        await FakeCall(pool).done
    assert told.value.kind == "overloaded"
    with pytest.raises(EngineError, match="no engine"):
        await pool.count_tokens(REQUEST, "group", None)


async def test_without_a_replica_calls_are_held_while_paused() -> None:
    pool = pool_of()
    await pool.pause()
    call = FakeCall(pool)
    count = asyncio.create_task(pool.count_tokens(REQUEST, "group", None))
    waits = asyncio.create_task(pool.wait_until_routable())
    await run_event_loop()
    assert pool.gate.held == 3
    pool.add(FakeEngine())
    await run_event_loop()
    assert not call.done.done()
    await pool.resume()
    await call.done
    await waits
    assert call.ids == [1, 2]
    assert await count == 7


async def test_a_call_that_is_cancelled_twice_leaves_its_replica() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    (replica,) = pool.replicas
    answer = asyncio.Event()
    replica._restart_check = asyncio.create_task(answer.wait())  # type: ignore[arg-type]
    for _ in range(2):  # the second time while it waits to know the engine's process
        call.done.cancel()
        await run_event_loop()
    assert call.done.cancelled()
    assert not replica.running
    assert engine.left == 1
    answer.set()


# Engines that go away while calls are held


async def test_a_call_whose_engine_goes_away_while_paused_is_held() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.begins.clear()
    call = FakeCall(pool)
    await run_event_loop()
    await pool.pause(freeze=False)
    engine.failing["generate"] = make_unreachable_error()
    engine.begins.set()
    await run_event_loop()
    assert (pool.gate.held, call.stood_still) == (1, 1)
    assert not pool.replicas[0].running
    engine.failing.clear()
    await pool.resume()
    await call.done
    assert call.ids == [1, 2]


async def test_a_call_that_had_begun_fails_also_while_paused() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    await pool.pause(freeze=False)
    engine.failing["finish"] = make_unreachable_error()
    engine.ends.set()
    with pytest.raises(EngineError):
        await call.done


async def test_a_call_tries_every_replica_once_before_it_fails() -> None:
    engines = [FakeEngine(f"http://{name}") for name in "abc"]
    pool = pool_of(*engines)
    for engine in engines:
        engine.failing["generate"] = make_unreachable_error()
    with pytest.raises(EngineError, match="reached"):
        await FakeCall(pool).done
    assert [engine.calls for engine in engines] == [1, 1, 1]


async def test_a_call_that_comes_as_the_gate_opens_and_closes_is_held() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    await pool.pause(freeze=False)
    call = FakeCall(pool)
    await run_event_loop()
    pool.gate.open()
    pool.gate.close()
    await run_event_loop()
    assert engine.calls == 0
    await pool.resume()
    await call.done


# New weights


async def test_who_has_the_engine_alone_knows_where_new_weights_begin() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    assert await pool.pause()
    pool.set_version(1)
    assert call.versions == []
    await pool.resume()
    assert call.versions == [(1, True)]
    engine.ends.set()
    await call.done


@pytest.mark.parametrize(
    ("error", "told"), [(make_timeout_error(), ["freeze", "thaw"]), (make_unreachable_error(), ["freeze"])]
)
async def test_an_engine_that_may_have_frozen_is_thawed(error: EngineError, told: list[str]) -> None:
    """Its answer was lost, perhaps; calls there can't know where new weights begin."""
    one, two = FakeEngine("http://one"), FakeEngine("http://two")
    pool = pool_of(one, two)
    one.ends.clear()
    call = FakeCall(pool, home=pool.replicas[0])
    await run_event_loop()
    one.failing["freeze"] = error
    with pytest.raises(EngineError):
        await pool.pause()
    assert not pool.gate.frozen
    pool.set_version(1)
    assert call.versions == [(1, False)]
    await pool.resume()
    assert (one.switched, two.switched) == (told, ["freeze", "thaw"])
    one.ends.set()
    await call.done


async def test_an_engine_that_can_not_freeze_is_let_run() -> None:
    engine = FakeEngine()
    engine.can_freeze = False
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    assert not await pool.pause()
    await pool.resume()
    assert engine.switched == ["freeze"]
    engine.ends.set()
    await call.done


# Sleep


async def test_engines_sleep_when_the_last_call_has_ended() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    running = FakeCall(pool)
    await run_event_loop()
    sleeping = asyncio.create_task(pool.sleep())
    await run_event_loop()
    held = FakeCall(pool)
    await run_event_loop()
    assert (engine.switched, pool.gate.held) == ([], 1)
    engine.ends.set()
    await running.done
    assert await sleeping
    assert pool.replicas[0].asleep
    assert engine.switched == ["sleep"]
    assert await pool.sleep()
    assert engine.switched == ["sleep"]  # some engines must not be told twice
    assert not held.done.done()
    await pool.resume()
    await held.done
    assert engine.orders[-3:] == ["wake", "generate", "finish"]
    assert held.stood_still == 1


async def test_frozen_calls_go_on_before_their_engine_sleeps() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    await pool.pause()
    sleeping = asyncio.create_task(pool.sleep())
    await run_event_loop()
    assert engine.switched == ["freeze", "thaw"]
    assert not pool.gate.frozen
    engine.ends.set()
    await call.done
    assert await sleeping
    assert engine.switched == ["freeze", "thaw", "sleep"]


async def test_nobody_elses_calls_are_broken_off() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.others = 2
    sleeping = asyncio.create_task(pool.sleep())
    await run_event_loop()
    assert engine.switched == []
    engine.others = 0
    assert await sleeping


@pytest.mark.parametrize("instead", ["resume", "pause"])
async def test_who_is_to_go_on_before_all_have_ended_does_not_sleep(instead: str) -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.ends.clear()
    call = FakeCall(pool)
    await run_event_loop()
    sleeping = asyncio.create_task(pool.sleep())
    await run_event_loop()
    await (pool.resume() if instead == "resume" else pool.pause(freeze=False))
    assert not await sleeping
    engine.ends.set()
    await call.done
    await run_event_loop()
    assert engine.switched == []
    assert pool.gate.paused == (instead == "pause")


async def test_engines_are_woken_for_new_weights_while_calls_are_held() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    await pool.sleep()
    held = FakeCall(pool)
    await pool.pause(freeze=False)
    await run_event_loop()
    assert engine.switched == ["sleep", "wake"]
    assert not pool.replicas[0].asleep
    assert not held.done.done()
    await pool.resume()
    await held.done
    assert engine.switched == ["sleep", "wake"]


async def test_an_engine_that_cannot_sleep_is_drained() -> None:
    engine = FakeEngine()
    engine.can_sleep = False
    pool = pool_of(engine)
    assert not await pool.sleep()
    assert pool.gate.paused
    call = FakeCall(pool)
    await pool.resume()
    await call.done
    assert engine.switched == ["sleep"]


async def test_calls_stay_held_while_every_engine_sleeps_on() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    await pool.sleep()
    call = FakeCall(pool)
    engine.failing["wake"] = make_engine_error()
    with pytest.raises(EngineError, match="memory"):
        await pool.resume()
    await run_event_loop()
    assert not call.done.done()
    engine.failing.clear()
    await pool.resume()
    await call.done


async def test_an_engine_that_sleeps_on_gets_no_calls() -> None:
    one, two = FakeEngine("http://one"), FakeEngine("http://two")
    pool = pool_of(one, two)
    await pool.sleep()
    one.failing["wake"] = make_engine_error()
    with pytest.raises(EngineError, match="memory"):
        await pool.resume()
    pool.replicas[0].mark_reachable()  # also when it is not left alone any more
    for number in range(10):
        await FakeCall(pool, str(number), pool.replicas[0]).done
    assert (one.calls, two.calls) == (0, 10)


async def test_an_engine_that_is_gone_when_it_is_to_wake_comes_back_awake() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    await pool.sleep()
    engine.failing["wake"] = make_unreachable_error()
    with pytest.raises(EngineError, match="reached"):
        await pool.resume()
    await FakeCall(pool).done
    assert engine.calls == 1


async def test_an_engine_that_is_gone_when_it_is_to_sleep_need_not_be_woken() -> None:
    engine = FakeEngine()
    pool = pool_of(engine)
    engine.failing["sleep"] = make_unreachable_error()
    with pytest.raises(EngineError, match="reached"):
        await pool.sleep()
    await pool.resume()
    await FakeCall(pool).done
    assert engine.switched == ["sleep"]


async def test_one_engine_that_fails_to_sleep_keeps_no_other_awake() -> None:
    one, two = FakeEngine("http://one"), FakeEngine("http://two")
    pool = pool_of(one, two)
    one.failing["sleep"] = make_engine_error()
    with pytest.raises(EngineError, match="memory"):
        await pool.sleep()
    assert two.switched == ["sleep"]
    await pool.resume()  # nobody knows whether the first one slept: it is woken, too
    assert (one.switched, two.switched) == (["sleep", "wake"], ["sleep", "wake"])

"""What a session may use: turns, tokens, and seconds that stand still while it can't get on."""

import asyncio

import pytest

from polar.errors import ApiError
from polar.gateway import meter as module
from polar.gateway.meter import Clock, Meter


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def test_a_clock_counts_from_its_start_and_not_while_it_is_held(time: Time) -> None:
    clock = Clock()
    time.now += 5
    assert clock.get_elapsed_seconds() == 0
    clock.start()
    time.now += 2
    clock.hold("a")
    clock.hold("b")
    time.now += 10
    clock.release("a")
    time.now += 10
    clock.release("b")
    clock.release("b")
    time.now += 3
    assert clock.get_elapsed_seconds() == 5


def test_a_clock_runs_while_somebody_is_busy_whoever_else_waits(time: Time) -> None:
    clock = Clock()
    clock.start()
    clock.hold("waits")
    time.now += 10
    clock.mark_busy("samples")
    time.now += 2
    clock.hold("samples")  # frozen in the middle
    time.now += 10
    clock.mark_busy("samples")
    time.now += 1
    clock.release("samples")
    time.now += 10
    assert clock.get_elapsed_seconds() == 3


def test_a_clock_that_is_held_before_its_start_waits_for_its_release(time: Time) -> None:
    clock = Clock()
    clock.hold("a")
    clock.start()
    time.now += 4
    assert clock.get_elapsed_seconds() == 0
    clock.release("a")
    time.now += 1
    assert clock.get_elapsed_seconds() == 1


def test_turns_run_out() -> None:
    meter = Meter(max_turns=2)
    assert meter.begin_call(None) is None
    assert meter.begin_call(7) == 7
    with pytest.raises(ApiError, match="turns"):
        meter.begin_call(7)
    assert meter.turns == 2


async def test_tokens_run_out_and_no_call_may_sample_more_than_is_left() -> None:
    meter = Meter(max_tokens=10)
    assert meter.begin_call(None) == 10
    meter.add_tokens(6)
    assert meter.begin_call(100) == 4
    assert meter.begin_call(3) == 3
    meter.add_tokens(4)
    assert await asyncio.wait_for(meter.wait_until_used_up(60), 120) == "length"
    with pytest.raises(ApiError, match="tokens"):
        meter.begin_call(1)


async def test_seconds_run_out_but_not_while_the_clock_is_held() -> None:
    meter = Meter()
    meter.clock.start()
    meter.clock.hold("a")
    waiting = asyncio.ensure_future(meter.wait_until_used_up(0.01))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    meter.clock.release("a")
    assert await asyncio.wait_for(waiting, 120) == "timeout"


@pytest.mark.parametrize("kind", ["engine", "overloaded", "timeout", "internal", "rate_limit"])
def test_a_call_that_the_platform_failed(kind: str) -> None:
    meter = Meter()
    meter.record_failure("e1", ApiError(kind, "the engine is gone"))  # type: ignore[arg-type]
    assert meter.find_platform_failure("e1") == "the engine is gone"
    assert meter.find_platform_failure("e2") is None
    assert not meter.exceeded_context("e1")


@pytest.mark.parametrize("kind", ["invalid_request", "unsupported", "too_large", "context_length"])
def test_what_the_harness_got_wrong_is_not_the_platforms_fault(kind: str) -> None:
    meter = Meter()
    meter.record_failure("e1", ApiError(kind, "no"))  # type: ignore[arg-type]
    assert meter.find_platform_failure("e1") is None
    assert meter.exceeded_context("e1") == (kind == "context_length")

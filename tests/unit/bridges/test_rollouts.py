"""Sessions of a group that are asked for one by one, without a server."""

import asyncio
import gc
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from polar.bridges import rollouts
from polar.bridges.rollouts import RolloutClient, SessionGroup, SharedGroups
from polar.bridges.settings import BridgeSettings
from polar.config import SamplingOverrides


class Asked(RolloutClient):
    def __init__(self, *failing: int) -> None:
        """`failing` are the calls that fail."""
        self.calls, self._failing = 0, failing

    async def run_group(self, task: str, key: str, **more: Any) -> SessionGroup:
        self.calls += 1
        call = self.calls
        await asyncio.sleep(0.01)
        if call in self._failing:
            raise ValueError("It is away.")
        return SessionGroup(task, f"run/{key}/{task}", more["samples"], [], [], Counter())


def one_of(groups: SharedGroups, key: str = "k", samples: int = 2) -> Coroutine[Any, Any, tuple[SessionGroup, int]]:
    return groups.claim_session("t", key, samples, SamplingOverrides())


async def test_sessions_of_a_group_share_it() -> None:
    """Asked for once, and forgotten when the last one has come for it. Who asks again is given all of it again."""
    groups = SharedGroups(asked := Asked())
    (one, first), (two, second) = await asyncio.gather(one_of(groups), one_of(groups))
    assert one is two
    assert (first, second, asked.calls) == (0, 1, 1)
    assert not groups._pending
    again = await asyncio.gather(one_of(groups), one_of(groups))
    assert ([number for _, number in again], asked.calls) == ([0, 1], 2)
    await one_of(groups, "other", 1)
    assert asked.calls == 3


async def test_one_that_is_cancelled_leaves_the_group_to_the_others() -> None:
    groups = SharedGroups(asked := Asked())
    first = asyncio.ensure_future(one_of(groups))
    await asyncio.sleep(0)
    first.cancel()
    _, number = await one_of(groups)
    assert (number, asked.calls, first.cancelled()) == (1, 1, True)


async def test_a_group_that_failed_is_asked_for_again() -> None:
    """All who waited are told; who comes later is not."""
    groups = SharedGroups(asked := Asked(1))
    told = await asyncio.gather(one_of(groups, samples=3), one_of(groups, samples=3), return_exceptions=True)
    assert [str(one) for one in told] == ["It is away."] * 2
    _, number = await one_of(groups, samples=3)
    assert (number, asked.calls) == (0, 2)


async def test_a_group_that_fails_when_nobody_waits_for_it() -> None:
    """asyncio has nothing to complain of."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    groups = SharedGroups(Asked(1))
    only = asyncio.ensure_future(one_of(groups, samples=1))
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.wait([only])
    del only  # with its frames
    await asyncio.sleep(0.03)
    gc.collect()
    assert not complaints


def test_a_client_for_each_loop_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_shared_groups", {})
    monkeypatch.setattr(rollouts, "RolloutClient", lambda _: Asked())
    one, other = (BridgeSettings(name=name, tasks=[]) for name in ("one", "other"))

    async def found() -> SharedGroups:
        assert rollouts.get_shared_groups(one) is rollouts.get_shared_groups(one.model_copy())
        assert rollouts.get_shared_groups(one) is not rollouts.get_shared_groups(other)
        return rollouts.get_shared_groups(one)

    assert asyncio.run(found()) is not asyncio.run(found())
    assert len(rollouts._shared_groups) == 1  # the first loop is closed


async def test_groups_that_nobody_finishes_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_MAX_PENDING_GROUPS", 2)
    groups = SharedGroups(Asked())
    for step in range(5):
        await one_of(groups, f"step-{step}")
    assert [key for _, key in groups._pending] == ["step-3", "step-4"]

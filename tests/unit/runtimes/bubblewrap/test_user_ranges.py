"""Ranges of user ids come back where what they were taken for fails, or is cancelled."""

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from polar.runtimes.base import RuntimeSpec, SandboxError
from polar.runtimes.bubblewrap import Bubblewrap, user_ranges
from polar.runtimes.bubblewrap.user_ranges import UserRange, UserRanges
from polar.runtimes.cgroups import CgroupHierarchies
from polar.runtimes.spawner.client import Spawner


class FailingSpawner:
    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    async def spawn(self, *_: Any) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        raise SandboxError("no spawner")


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_range_without_a_namespace_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(user_ranges, "_RANGE_COUNT", 2)
    monkeypatch.setattr(user_ranges, "_can_map_ranges", lambda: True)
    ranges = UserRanges(cast("Spawner", FailingSpawner(hangs=hangs)), tmp_path / "locks")
    others = UserRanges(cast("Spawner", FailingSpawner(hangs=False)), tmp_path / "locks")
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TimeoutError if hangs else SandboxError, match=None if hangs else "no spawner"):
            async with asyncio.timeout(0.01):
                await ranges.acquire()
    with pytest.raises(SandboxError, match="no spawner"):  # and not that all are in use
        await others.acquire()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    ranges.close()
    others.close()


class Ranges:
    def __init__(self) -> None:
        self.taken = 0

    async def acquire(self) -> UserRange:
        self.taken += 1
        return UserRange(0, -1)

    def release(self, _: UserRange) -> None:
        self.taken -= 1

    def close(self) -> None:
        pass


@pytest.fixture
def ranges() -> Ranges:
    return Ranges()


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: Ranges) -> Bubblewrap:
    """Nothing is run in it."""
    kind = Bubblewrap(tmp_path / "state", "http://127.0.0.1:1")
    monkeypatch.setattr(kind, "_ranges", ranges)
    monkeypatch.setattr(kind, "_cgroups", CgroupHierarchies(None, frozenset(), {}))
    monkeypatch.setattr(kind, "list_lower_layers", lambda _: (tmp_path,))
    monkeypatch.setattr(kind, "list_visible_folders", lambda _: [])
    return kind


@pytest.mark.parametrize("error", [OSError("full"), asyncio.CancelledError()])
async def test_a_range_that_could_not_be_tried_is_given_back(
    kind: Bubblewrap, ranges: Ranges, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(kind, "_check_mappable", fail)
    with pytest.raises(type(error)):
        await kind.create("id", RuntimeSpec())
    assert ranges.taken == 0


async def test_a_range_without_a_sandbox_is_given_back(
    kind: Bubblewrap, ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mappable(*_: Any) -> None:
        return None

    def fail(_: str) -> None:
        raise OSError("The disk is full.")

    monkeypatch.setattr(kind, "_check_mappable", mappable)
    monkeypatch.setattr(kind._state, "create_runtime_folder", fail)
    with pytest.raises(OSError, match="full"):
        await kind.create("id", RuntimeSpec())
    assert ranges.taken == 0
    assert kind.runtimes == {}

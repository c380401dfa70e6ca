"""What the writer says of a database that can't write."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from polar.errors import StoreError
from polar.store import group_commit
from polar.store.group_commit import GroupCommit
from tests.conditions import wait_until


class Disk:
    """A database whose disk may be full."""

    def __init__(self) -> None:
        self.full = False
        self.has_room_for_probe = True
        self.probes = 0

    def begin(self) -> None: ...

    def commit(self) -> None:
        if self.full:
            raise OSError("full")

    def roll_back(self, error: Exception) -> bool:
        return False

    def on_settled(self) -> None: ...

    def to_store_error(self, error: Exception) -> StoreError:
        return error if isinstance(error, StoreError) else StoreError(f"The disk is {error}.")

    def is_write_failure(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    def probe(self) -> None:
        self.probes += 1
        if not self.has_room_for_probe:
            raise OSError("too small")

    def close(self) -> None: ...


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(group_commit, "PROBE_SECONDS", 0.01)
    return Disk()


@pytest_asyncio.fixture
async def writing(disk: Disk) -> AsyncIterator[GroupCommit]:
    made = GroupCommit(disk, "writer")
    yield made
    await made.close()


async def test_a_failed_commit_is_a_failure_until_a_probe_succeeds(disk: Disk, writing: GroupCommit) -> None:
    assert await writing.submit(lambda: 1) == 1
    assert writing.failure is None
    assert disk.probes == 0
    disk.full = True
    with pytest.raises(StoreError, match="full"):
        await writing.submit(lambda: 2)
    await wait_until(lambda: disk.probes >= 3)
    assert str(writing.failure) == "The disk is full."
    disk.full = False  # nobody writes
    await wait_until(lambda: writing.failure is None)
    probes = disk.probes
    assert await writing.submit(lambda: 3) == 3
    assert disk.probes == probes


async def test_a_small_success_is_not_enough(disk: Disk, writing: GroupCommit) -> None:
    disk.full, disk.has_room_for_probe = True, False
    with pytest.raises(StoreError, match="full"):
        await writing.submit(lambda: 1)
    disk.full = False
    for _ in range(5):
        await writing.submit(lambda: 2)
        await asyncio.sleep(0)
    await wait_until(lambda: disk.probes >= 2)
    assert str(writing.failure) == "The disk is too small."
    disk.has_room_for_probe = True
    await wait_until(lambda: writing.failure is None)


async def test_a_mistake_of_the_callers_is_no_failure(writing: GroupCommit) -> None:
    def work() -> None:
        raise StoreError("No such session.")

    with pytest.raises(StoreError, match="No such session"):
        await writing.submit(work)
    assert writing.failure is None


async def test_closing_does_not_wait_for_probes(disk: Disk, writing: GroupCommit) -> None:
    disk.full = True
    with pytest.raises(StoreError, match="full"):
        await writing.submit(lambda: 1)
    await writing.close()
    assert writing.failure is not None

"""The feed of results: each once and in order, whatever breaks."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from polar.client import calls, feed
from polar.client.async_client import AsyncClient, ClientError
from polar.records.result import GroupResult, NumberedResult
from tests.unit.client.plane import Plane


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(plane.url, patience=120) as client:
        yield client


def ended(plane: Plane, count: int) -> None:
    for number in range(count):
        plane.end(f"t{number}")


async def test_they_come_as_they_end_and_carry_their_cursors(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 3)
    results = client.results(limit=2)
    assert results.cursor is None
    for number in range(3):
        result = await anext(results)
        assert isinstance(result, NumberedResult)
        assert (result.task_id, result.cursor, result.sample) == (f"t{number}", number + 1, 0)
        assert results.cursor == number + 1
    waiting = asyncio.ensure_future(anext(results))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    plane.end("late", 5)
    assert (await waiting).sample == 5


async def test_what_is_asked_for_is_passed_on(plane: Plane) -> None:
    ended(plane, 3)
    async with AsyncClient(plane.url, run="r") as client:
        async for _ in client.results(1, builder="per_request", suspicious="only", limit=7, wait=3, count=1):
            pass
    (_, path, query, _), *_ = plane.seen
    assert path == "/rollout/results"
    asked = {"run": "r", "unit": "session", "builder": "per_request", "suspicious": "only"}
    assert query == {**asked, "after": "1", "limit": "1", "wait": "3"}


async def test_no_more_than_a_page_is_read_ahead(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 10)
    results = client.results(limit=4)
    for _ in range(4):
        await anext(results)
    await asyncio.sleep(0.1)
    assert len(plane.seen) == 1
    await anext(results)
    assert [query.get("after") for *_, query, _ in plane.seen] == [None, "4"]


async def test_it_ends_where_nothing_is_left_or_after_so_many(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 5)
    assert [one.cursor async for one in client.results(limit=2, follow=False)] == [1, 2, 3, 4, 5]
    assert [one.cursor async for one in client.results(after=3, follow=False)] == [4, 5]
    assert [one.cursor async for one in client.results(limit=2, count=3)] == [1, 2, 3]
    assert [one.cursor async for one in client.results(follow=False, after=5)] == []


@pytest.mark.parametrize("seed", range(5))
async def test_each_comes_once_and_in_order_whatever_breaks(
    plane: Plane, client: AsyncClient, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_MAX_RETRY_SECONDS", 0.1)
    chance = random.Random(seed)
    kinds: list[Any] = ["drop", "lose", "truncate", "cut", 503, None, None]
    plane.faults.extend(chance.choice(kinds) for _ in range(40))

    async def produce() -> None:
        for number in range(60):
            plane.end(f"t{number}")
            await asyncio.sleep(chance.random() * 0.02)
            if number in (20, 40):
                await plane.stop()
                await asyncio.sleep(0.1)
                await plane.start()

    producing = asyncio.create_task(produce())
    results = client.results(limit=chance.randint(1, 9), wait=0.2, consumer="trainer", count=60)
    assert [one.cursor async for one in results] == list(range(1, 61))
    await producing
    assert plane.consumers == {"trainer": 60}


async def test_after_an_error_it_goes_on_where_it_was(plane: Plane) -> None:
    ended(plane, 4)
    async with AsyncClient(plane.url, patience=0) as client:
        results = client.results(limit=2)
        assert [(await anext(results)).cursor for _ in range(2)] == [1, 2]
        plane.faults.append("truncate")
        with pytest.raises(ClientError):
            await anext(results)
        assert (await anext(results)).cursor == 3


async def test_who_gives_up_waiting_loses_nothing(plane: Plane, client: AsyncClient) -> None:
    results = client.results()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(results), 0.1)
    ended(plane, 1)
    assert (await anext(results)).cursor == 1


async def test_several_readers_share_one_feed(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 20)
    results = client.results(limit=3, count=20)

    async def read() -> list[int]:
        return [one.cursor async for one in results]

    read_by = await asyncio.gather(*(read() for _ in range(4)))
    assert sorted(cursor for some in read_by for cursor in some) == list(range(1, 21))


async def test_a_result_that_comes_twice_is_an_error(plane: Plane, client: AsyncClient) -> None:
    page = {"results": [{"cursor": 4, "task_id": "a"}], "cursor": 4}
    plane.faults.append(web.json_response(page))
    with pytest.raises(ClientError, match="gave the result 4 after 4, out of order"):
        await anext(client.results(after=4))


async def test_a_result_of_another_shape_is_an_error_and_is_not_skipped(plane: Plane, client: AsyncClient) -> None:
    plane.end("a", status="WHATEVER")
    results = client.results()
    for _ in range(2):
        with pytest.raises(ClientError, match="the result 1 is not as this client knows it"):
            await anext(results)
    assert results.cursor is None


# a place that the server remembers


async def test_a_place_moves_on_when_the_next_page_is_asked_for(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 6)
    first = client.results(consumer="c", limit=2)
    assert [(await anext(first)).cursor for _ in range(2)] == [1, 2]
    assert plane.consumers == {}  # these two may still be lost with whoever reads
    assert (await anext(first)).cursor == 3
    assert plane.consumers == {"c": 2}
    second = client.results(consumer="c", limit=2)  # the first reader crashed
    assert [(await anext(second)).cursor for _ in range(3)] == [3, 4, 5]
    await second.acknowledge()
    assert plane.consumers == {"c": 5}
    assert (await anext(client.results(consumer="c"))).cursor == 6
    assert (await anext(client.results(consumer="other"))).cursor == 1


async def test_asking_beyond_the_last_one_says_that_it_is_done(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 5)
    seen = []
    async for one in client.results(consumer="c", count=3):
        assert plane.consumers == {}
        seen.append(one.cursor)
    assert seen == [1, 2, 3]
    assert plane.consumers == {"c": 3}
    assert [one.cursor async for one in client.results(consumer="c", follow=False)] == [4, 5]
    assert plane.consumers == {"c": 5}


async def test_a_cursor_that_is_given_is_the_place_from_then_on(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 3)
    plane.consumers["c"] = 3
    assert (await anext(client.results(after=1, consumer="c"))).cursor == 2
    assert plane.consumers == {"c": 1}


# kinds of results


async def test_groups(plane: Plane, client: AsyncClient) -> None:
    ended(plane, 2)
    groups = [group async for group in client.results(unit="group", count=2)]
    assert all(isinstance(group, GroupResult) for group in groups)
    assert [(group.task_id, group.cursor, group.asked, group.usable) for group in groups] == [
        ("t0", 1, 1, 1),
        ("t1", 2, 1, 1),
    ]
    assert groups[0].results[0].session_id == "s1"


async def test_raw_ones_are_what_the_server_sent(plane: Plane, client: AsyncClient) -> None:
    plane.end("a", trajectory={"anything": [0.1] * 50_000}, status="WHATEVER")
    (result,) = [one async for one in client.results(raw=True, count=1)]
    assert (result.cursor, result.task_id) == (1, "a")
    assert msgspec.json.decode(result.data) == plane.sessions[0]


# its end


async def test_closing_ends_whoever_waits(plane: Plane, client: AsyncClient) -> None:
    async with client.results() as results:
        reading = asyncio.create_task(_all(results))
        await asyncio.sleep(0.1)
        assert not reading.done()
    assert await reading == []
    ended(plane, 1)
    assert await _all(results) == []


async def _all(results: Any) -> list[Any]:
    return [one async for one in results]


@pytest.mark.parametrize(
    "data",
    [
        b'{"cursor":12,"sample":3,"session_id":"s1","task_id":"a\\"b\\u00e9","rest":[1]}',
        b'{"task_id":"a\\"b\\u00e9","rest":[1],"cursor":12}',
        b'{"cursor": 12, "sample": 3, "session_id": "s1", "task_id": "a\\"b\\u00e9"}',
    ],
)
def test_the_head_of_a_result_is_found_wherever_it_stands(data: bytes) -> None:
    head = feed._read_key(data)
    assert (head.cursor, head.task_id) == (12, 'a"bé')

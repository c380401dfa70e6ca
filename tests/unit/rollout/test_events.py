"""Events: told to whoever listens, without waiting for anybody."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from polar.rollout.events import EventBus, EventListener, ServiceEvent
from polar.rollout.routes import service
from tests.unit.rollout.listening import listening
from tests.unit.rollout.served import served, task


async def heard(listener: EventListener) -> list[ServiceEvent]:
    """All that is there now."""
    found = []
    while True:
        try:
            event = await asyncio.wait_for(listener.wait_for_event(), 0.01)
        except TimeoutError:
            return found
        if event is None:
            return found
        found.append(event)


async def test_whoever_listens_hears_of_its_run_and_of_what_concerns_all() -> None:
    events = EventBus()
    everything, mine = events.subscribe(), events.subscribe("mine")
    events.publish("task.ended", run="mine", task_id="a")
    events.publish("task.ended", run="other", task_id="b")
    events.publish("node.lost", node_id="n")
    assert [event.fields.get("task_id") for event in await heard(everything)] == ["a", "b", None]
    told = await heard(mine)
    assert [event.kind for event in told] == ["task.ended", "node.lost"]
    assert msgspec.json.decode(told[0].data) == {"run": "mine", "task_id": "a"}


async def test_one_who_comes_back_goes_on_where_it_was() -> None:
    events = EventBus(max_remembered=5)
    for number in range(4):
        events.publish("node.joined", number=number)
    first, *rest = await heard(events.subscribe(after=await first_id(events)))
    assert [first.fields["number"], *(event.fields["number"] for event in rest)] == [1, 2, 3]
    assert await heard(events.subscribe(after=rest[-1].id)) == []
    for number in range(4, 20):
        events.publish("node.joined", number=number)
    gone = events.subscribe(after=first.id)
    events.publish("node.joined", number=20)
    assert [event.kind for event in await heard(gone)] == ["lagged", "node.joined"]


async def first_id(events: EventBus) -> str:
    return events._remembered[0].id


async def test_an_id_that_is_none_of_this_server_s_is_told_so() -> None:
    events = EventBus()
    events.publish("node.joined")
    own = (await first_id(events)).rpartition("-")[0]
    for id in ("0000-1", "nonsense", "", f"{own}-99", f"{own}--1", f"{own}-x", f"{own}-{'9' * 400}", f"{own}-\u0663"):
        assert [event.kind for event in await heard(events.subscribe(after=id))] == ["lagged"], id


async def test_a_slow_listener_is_let_go_and_holds_nobody_up() -> None:
    events = EventBus(max_pending=3)
    slow, quick = events.subscribe(), events.subscribe()
    got = []
    for number in range(10):
        events.publish("node.joined", number=number)
        got += [event.fields["number"] for event in await heard(quick)]
    assert got == list(range(10))
    told = [event async for event in slow]
    assert [event.kind for event in told] == ["node.joined"] * 3 + ["lagged"]
    assert not events._listeners - {quick}


async def test_an_end_lets_everybody_go() -> None:
    events = EventBus()
    listener = events.subscribe()
    events.publish("node.joined")
    events.close()
    assert len([event async for event in listener]) == 1
    assert [event async for event in events.subscribe()] == []


async def read(response: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    fields: dict[str, str] = {}
    async with asyncio.timeout(120):
        while len(found) < count:
            name, _, value = (await response.content.readline()).decode().rstrip("\n").partition(": ")
            if name in ("id", "event", "data"):
                fields[name] = value
            elif not name and fields:
                found.append(fields)
                fields = {}
    return found


async def test_events_over_http(tmp_path: Path) -> None:
    async with served(tmp_path) as it, listening(it.app) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert await response.content.readline() == b": listening\n"
            await it.submit(task())
            await it.run_all()
            told = await read(response, 5)
        assert [event["event"] for event in told] == [
            "task.submitted",
            "node.joined",
            "session.leased",
            "session.ended",
            "task.ended",
        ]
        assert msgspec.json.decode(told[3]["data"])["session_id"] == "s-t-0"
        async with http.get(f"{url}/events", headers={"Last-Event-ID": told[1]["id"]}) as response:
            assert await read(response, 3) == told[2:]
        async with http.get(
            f"{url}/events", params={"run": "other"}, headers={"Last-Event-ID": told[0]["id"]}
        ) as response:
            assert await read(response, 1) == [told[1]]


async def test_a_silent_stream_says_that_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HEARTBEAT_SECONDS", 0.02)
    async with served(tmp_path) as it, listening(it.app) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/events") as response, asyncio.timeout(120):
            lines = [await response.content.readline() for _ in range(6)]
            assert lines[2:] == [b": still here\n", b"\n"] * 2
            it.rollout.events.close()
            rest = await response.read()
        assert rest.replace(b": still here\n\n", b"") == b""


async def test_a_listener_that_breaks_off_is_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path) as it, listening(it.app) as url, aiohttp.ClientSession() as http:
        listeners = it.rollout.events._listeners
        before = len(listeners)
        async with http.get(f"{url}/events") as response:
            await response.content.readline()
            assert len(listeners) == before + 1
        async with asyncio.timeout(120):
            while len(listeners) > before:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.01)

"""A stage never holds more than it may, loses no place, and lets the urgent ones in first."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from polar.node.stages import Stage


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel", "turn"]), st.integers(0, 30)), max_size=60),
)
def test_whatever_happens_places_are_neither_lost_nor_made(size: int, steps: list[tuple[str, int]]) -> None:
    asyncio.run(_random_life(size, steps))


async def _random_life(size: int, steps: list[tuple[str, int]]) -> None:
    stage = Stage("run", size)
    waiting: list[asyncio.Task[None]] = []

    def inside() -> list[asyncio.Task[None]]:
        return [task for task in waiting if task.done() and not task.cancelled()]

    for step, number in steps:
        if step == "enter":
            waiting.append(asyncio.ensure_future(stage.enter(number)))
        elif step == "leave" and inside():
            waiting.remove(inside()[number % len(inside())])
            stage.leave()
        elif step == "cancel" and waiting:
            waiting[number % len(waiting)].cancel()
        else:
            await asyncio.sleep(0)
        assert len(inside()) <= size
    for _ in range(3):  # until nothing moves any more
        await asyncio.sleep(0)
    waiting = [task for task in waiting if not task.cancelled()]
    assert len(inside()) == min(size, len(waiting)) == stage.active
    assert stage.waiting == len(waiting) - len(inside())
    while inside():
        waiting.remove(inside()[0])
        stage.leave()
        await asyncio.sleep(0)
    assert not waiting
    assert stage.active == 0


async def test_the_urgent_go_first_and_equals_in_their_order() -> None:
    stage, came = Stage("init", 1), []

    async def go(name: str, priority: int) -> None:
        async with stage.slot(priority):
            came.append(name)
            await asyncio.sleep(0)

    await stage.enter()
    tasks = [asyncio.ensure_future(go(*one)) for one in (("a", 0), ("b", 5), ("c", 0), ("d", 5))]
    await asyncio.sleep(0)
    assert stage.waiting == 4
    stage.leave()
    await asyncio.gather(*tasks)
    assert came == ["b", "d", "a", "c"]

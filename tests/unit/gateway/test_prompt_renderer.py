"""What a gateway knows of a session's turns; and stop strings, which are cut from what is said."""

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.config import EngineSettings
from polar.gateway.prompt_renderer import PromptRenderer
from polar.gateway.session_registry import OpenSession
from polar.gateway.stop_strings import StopStringFilter
from polar.records.exchange import ContextMark, Exchange
from polar.rendering.continuation import TurnHistory
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallStart
from tests.unit.store import samples

MARK = ContextMark("digest", 3, "turns", "opening")


class Store:
    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges

    async def read_exchanges(self, _: str) -> AsyncIterator[Exchange]:
        for exchange in self._exchanges:
            yield exchange


def exchange(seq: int, **changes: Any) -> Exchange:
    made = samples.exchange("s", seq, [b'{"role":"user","content":"Hi"}'])
    return replace(made, **{"context_mark": MARK, **changes})


RENDERED = exchange(0)
BY_ENGINE = exchange(1, context_mark=None)
WITHOUT_IDS = exchange(2, context_mark=None, prompt_ids=None, sampled_ids=None, logprobs=None)
FAILED = exchange(3, sampled_ids=None, reply=None)


@pytest.mark.parametrize(
    "exchanges", [[RENDERED, BY_ENGINE, WITHOUT_IDS, FAILED], [WITHOUT_IDS, RENDERED], [BY_ENGINE], [WITHOUT_IDS]]
)
@pytest.mark.parametrize("rendered_before", [False, True])
async def test_a_session_knows_the_same_after_a_restart(exchanges: list[Exchange], rendered_before: bool) -> None:
    """Else a branch would have one reason before, and another one after it."""
    live, resumed = [OpenSession(samples.session("s"), next_seq) for next_seq in (0, len(exchanges))]
    store: Any = Store(exchanges)
    pools: Any = None
    first, second = [PromptRenderer(EngineSettings(), pools, store) for _ in range(2)]
    if rendered_before:
        assert await first.load_history(live) == TurnHistory()
    for recorded in exchanges:
        first.add_exchange(live, recorded, None)
    before, after = await first.load_history(live), await second.load_history(resumed)
    assert (before.turns, before.unmarked) == (after.turns, after.unmarked)


def said(events: list[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@given(
    text=st.text("ab\n", max_size=12),
    stop=st.text("ab\n", min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 15), max_size=4),
)
def test_what_stands_before_the_stop_string_is_said(text: str, stop: str, cuts: list[int]) -> None:
    whole = text + stop  # the engine stops with the token that completes it
    whole = whole[: whole.find(stop) + len(stop)]
    stops = StopStringFilter([stop])
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    events: list[ReplyEvent] = []
    for start, end in pairwise(edges):
        events += stops.feed([TextDelta(whole[start:end])])
        assert whole[: whole.find(stop)].startswith(said(events))  # nothing has to be taken back
    assert said(events + stops.finish(stop)) == whole[: whole.find(stop)]


@given(pieces=st.lists(st.text("ab", max_size=4), max_size=6), stop=st.text("ab", min_size=1, max_size=3))
def test_a_reply_that_ended_otherwise_is_said_whole(pieces: list[str], stop: str) -> None:
    stops = StopStringFilter([stop])
    events = [event for piece in pieces for event in stops.feed([TextDelta(piece)])]
    assert said(events + stops.finish(None)) == "".join(pieces)


def test_other_events_keep_their_place() -> None:
    stops = StopStringFilter(["END"])
    call = ToolCallStart("", "look")
    events = stops.feed([ReasoningDelta("EN"), TextDelta("text E"), call, TextDelta("EN")])
    assert events == [ReasoningDelta("EN"), TextDelta("text "), TextDelta("E"), call]
    assert stops.finish(None) == [TextDelta("EN")]


def test_without_stop_strings_nothing_is_held() -> None:
    events: list[ReplyEvent] = [TextDelta("E")]
    assert StopStringFilter([]).feed(events) is events

"""Stop strings: cut from what is said, wherever the stream was cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.stop_strings import StopStringFilter
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallStart


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

"""Server-sent events, however they are cut into chunks."""

import pytest

from polar.dialects.sse import EventParser

STREAM = b": hello\n\nevent: a\r\ndata: one\r\n\r\ndata:two\ndata: and\n\nid: 3\n\ndata: [DONE]\n\n"
EVENTS = [b"one", b"two\nand", b"[DONE]"]


def chunks(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def parsed(parser: EventParser, chunks: list[bytes]) -> list[bytes]:
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_in_chunks_of_any_size(size: int) -> None:
    assert parsed(EventParser(max_event_bytes=20), chunks(STREAM, size)) == EVENTS


@pytest.mark.parametrize("endless", [[b"data: x\n"], [b"data: x"], [b"data", b":\n"], [b"xxx"]])
def test_an_event_that_does_not_end(endless: list[bytes]) -> None:
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        parsed(EventParser(max_event_bytes=1000), endless * 1000)


def test_an_event_that_is_too_long_in_one_chunk() -> None:
    events = EventParser(max_event_bytes=100).feed(b"data: one\n\ndata: " + b"x" * 200 + b"\n\n")
    assert next(events) == b"one"
    with pytest.raises(ValueError, match="more than 100 bytes"):
        next(events)

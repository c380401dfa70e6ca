"""Server-sent events, both ways."""

from collections.abc import Iterator


def encode_event(data: bytes, name: bytes | None = None) -> bytes:
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
"""Ignored by every parser that follows the standard."""


class EventParser:
    """Cuts a byte stream into the `data` of its events, however the stream was cut into chunks.

    `max_event_bytes` bounds what one event may hold, so that a stream without line ends can't take all memory.
    """

    def __init__(self, max_event_bytes: int = 64 * 1024 * 1024) -> None:
        self._line: list[bytes] = []  # pieces of a line that has not ended
        self._line_size = 0
        self._data: list[bytes] = []  # of an event that has not ended
        self._data_size = 0
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *lines, rest = chunk.split(b"\n")
        if lines and self._line:
            self._line.append(lines[0])
            lines[0] = b"".join(self._line)
            self._line, self._line_size = [], 0
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._data_size += len(line)
                self._check_size()
            elif not line and self._data:
                yield self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data, self._data_size = [], 0
            # other fields (event, id, retry) and comments carry nothing that we use
        if rest:
            self._line.append(rest)
            self._line_size += len(rest)
            self._check_size()

    def _check_size(self) -> None:
        if self._data_size + self._line_size > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")

"""Events into parts: what a reply says, put together while it is sampled."""

from collections.abc import Callable, Iterable

from polar.types import CallDelta, CallStart, Event, Part, Reasoning, Text, TextDelta, ToolCall


class Parts:
    """Neighbours of one kind are one part."""

    def __init__(self) -> None:
        self._closed: list[Part] = []
        self._kind: type[Event] | None = None
        self._make: Callable[[str], Part] = Text
        self._pieces: list[str] = []

    def add(self, event: Event) -> None:
        if isinstance(event, CallDelta):
            self._pieces.append(event.arguments)
        elif isinstance(event, CallStart):
            self._begin(CallDelta, lambda text: _call(event, text))
        else:
            if self._kind is not type(event):
                self._begin(type(event), Text if isinstance(event, TextDelta) else Reasoning)
            self._pieces.append(event.text)

    def _begin(self, kind: type[Event], make: Callable[[str], Part]) -> None:
        self._closed = self.all()
        self._kind, self._make, self._pieces = kind, make, []

    def all(self) -> list[Part]:
        """What has come so far; a part that is still open as it stands."""
        return self._closed if self._kind is None else [*self._closed, self._make("".join(self._pieces))]


def joined(events: Iterable[Event]) -> list[Part]:
    parts = Parts()
    for event in events:
        parts.add(event)
    return parts.all()


def _call(start: CallStart, arguments: str) -> ToolCall:
    return ToolCall(start.id, start.name, arguments, start.kind, start.namespace, written=start.written)

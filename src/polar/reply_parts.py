"""Events into parts: what a reply says, put together while it is sampled."""

from collections.abc import Callable, Iterable

from polar.types import Part, Reasoning, ReplyEvent, Text, TextDelta, ToolCall, ToolCallDelta, ToolCallStart


class PartsBuilder:
    """Neighbours of one kind are one part."""

    def __init__(self) -> None:
        self._finished: list[Part] = []
        self._kind: type[ReplyEvent] | None = None
        self._make: Callable[[str], Part] = Text
        self._pieces: list[str] = []

    def add(self, event: ReplyEvent) -> None:
        if isinstance(event, ToolCallDelta):
            self._pieces.append(event.arguments)
        elif isinstance(event, ToolCallStart):
            self._begin(ToolCallDelta, lambda text: _make_tool_call(event, text))
        else:
            if self._kind is not type(event):
                self._begin(type(event), Text if isinstance(event, TextDelta) else Reasoning)
            self._pieces.append(event.text)

    def _begin(self, kind: type[ReplyEvent], make: Callable[[str], Part]) -> None:
        self._finished = self.build()
        self._kind, self._make, self._pieces = kind, make, []

    def build(self) -> list[Part]:
        """What has come so far; a part that is still open as it stands."""
        return self._finished if self._kind is None else [*self._finished, self._make("".join(self._pieces))]


def build_parts(events: Iterable[ReplyEvent]) -> list[Part]:
    parts = PartsBuilder()
    for event in events:
        parts.add(event)
    return parts.build()


def _make_tool_call(start: ToolCallStart, arguments: str) -> ToolCall:
    return ToolCall(start.id, start.name, arguments, start.kind, start.namespace, written=start.written)

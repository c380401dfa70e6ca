"""Stop strings, for engines that hand out ids: the string that ended a reply is sampled, but not part of what is
said."""

from polar.types import ReplyEvent, TextDelta


class StopStringFilter:
    """Holds back text that may be the beginning of a stop string, until it is known not to be one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def feed(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        if not self._stops:
            return events
        out: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._held += event.text
                sure = len(self._held) - self._undecided_length()
                if sure:
                    out.append(TextDelta(self._held[:sure]))
                    self._held = self._held[sure:]
            else:
                out += self._release()
                out.append(event)
        return out

    def finish(self, stopped_by: str | None) -> list[ReplyEvent]:
        """What was held, up to the string that ended the reply, if one did."""
        if stopped_by and (at := self._held.find(stopped_by)) >= 0:
            self._held = self._held[:at]
        return self._release()

    def _release(self) -> list[ReplyEvent]:
        held, self._held = self._held, ""
        return [TextDelta(held)] if held else []

    def _undecided_length(self) -> int:
        """How many characters at the end may belong to a stop string: whole ones, too, since the engine says which it
        was."""
        first = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if first:
            return len(self._held) - min(first)
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

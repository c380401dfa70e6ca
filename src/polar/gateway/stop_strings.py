"""Stop strings, in the text of engines that return ids."""

from polar.types import ReplyEvent, TextDelta


class StopStringFilter:
    """Removes stop strings from the text of engines that return ids: the string that ended a reply is sampled, but is
    not part of the reply. Text that may begin a stop string is held back until the next text decides."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held_text = ""

    def feed(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        if not self._stops:
            return events
        filtered: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._held_text += event.text
                decided = len(self._held_text) - self._count_undecided_characters()
                if decided:
                    filtered.append(TextDelta(self._held_text[:decided]))
                    self._held_text = self._held_text[decided:]
            else:
                filtered += self._release()
                filtered.append(event)
        return filtered

    def finish(self, stopped_by: str | None) -> list[ReplyEvent]:
        """Returns the text that was held back, up to the stop string that ended the reply, if one did."""
        if stopped_by and (at := self._held_text.find(stopped_by)) >= 0:
            self._held_text = self._held_text[:at]
        return self._release()

    def _release(self) -> list[ReplyEvent]:
        text, self._held_text = self._held_text, ""
        return [TextDelta(text)] if text else []

    def _count_undecided_characters(self) -> int:
        """Counts the characters at the end that may belong to a stop string. Complete stop strings count as well, since
        the engine says which one ended the reply."""
        starts = [at for stop in self._stops if (at := self._held_text.find(stop)) >= 0]
        if starts:
            return len(self._held_text) - min(starts)
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._held_text)), 0, -1):
            if any(stop.startswith(self._held_text[-size:]) for stop in self._stops):
                return size
        return 0

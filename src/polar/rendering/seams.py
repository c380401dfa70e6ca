"""How a template goes on behind a model's turn: proved once, so that a turn costs one rendering.

    ... (last piece of the turn) closing  end token  the next message  opening of the next turn
                                          `------------------- tail -------------------------´

Recorded ids can be extended by `encode(tail)` only if the tail doesn't depend on the turn. That is proved by rendering
a small conversation with turns of several shapes, each with short pieces and with long ones:

- the tails must be equal, and at least two shapes must render (those that a template refuses don't count). Templates
  may end turns with calls and turns without in different ways; then only shapes of one kind count for each other;
- the next message must not change how the turn itself is shown;
- long pieces must be shown whole and unchanged, wherever short ones are shown.

What isn't proved isn't used.
"""

import json
from typing import Any

from msgspec import Struct

from polar.rendering.encoder import PromptEncoder
from polar.rendering.messages import CallId, Context, Conversation, Item, Turn
from polar.rendering.skeleton import Piece, Place, Renderer, read
from polar.rendering.template import ChatMessage
from polar.types import ToolCall

_CALL = ToolCall("", "probe", '{"a": 1}')
_SHAPES = (
    Turn("", "t", []),
    Turn("r", "t", []),
    Turn("r", "", []),
    Turn("", "", [_CALL]),
    Turn("", "t", [_CALL]),
    Turn("r", "", [_CALL]),
    Turn("r", "t", [_CALL]),
    Turn("", "", [_CALL, _CALL]),
)
_LONG = 250
"""How often long pieces repeat their text: some thousand characters."""


class Seam(Struct, frozen=True):
    """How text goes on behind a turn: one of `closings`, then the tail. It begins with the end token; in templates
    without one, with the next message's opening."""

    closings: frozenset[str]
    openings: frozenset[str]  # what stands between the context and a turn's first piece


class _Sample(Struct):
    """One shape, rendered."""

    calls: bool
    shown: tuple[bool, bool, bool]
    last: Piece
    closing: str
    tail: str
    opening: str | None


class Seams:
    def __init__(self, renderer: Renderer, encoder: PromptEncoder, call_id: CallId) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._call_id = call_id
        self._sampled: dict[tuple[Any, ...], list[_Sample]] = {}
        self._proved: dict[tuple[Any, ...], Seam | None] = {}
        self._openings: dict[tuple[Any, ...], str | None] = {}

    def seam(self, last: Piece, calls: bool, following: str, conversation: Conversation) -> Seam | None:
        """Behind a turn whose last visible piece is `last`, before a message of role `following`; None where it isn't
        proved."""
        variant = _variant(conversation)
        key = (last, calls, following, *variant)
        if key not in self._proved:
            if (following, *variant) not in self._sampled:
                self._sampled[following, *variant] = self._samples(following, conversation)
            self._proved[key] = _prove(self._sampled[following, *variant], last, calls)
        return self._proved[key]

    def opening(self, conversation: Conversation) -> str | None:
        """The generation prompt: what the template adds for the model to go on from. None where it isn't just added."""
        last = conversation.items[-1] if conversation.items else None
        role = last.message["role"] if isinstance(last, Context) else "assistant"
        key = (role, *_variant(conversation))
        if key not in self._openings:
            self._openings[key] = self._find_opening(role, conversation)
        return self._openings[key]

    def _find_opening(self, role: str, conversation: Conversation) -> str | None:
        if role == "assistant":
            return None  # a turn that the model is to go on with: no template says how
        items: list[Item] = [_USER]
        if role == "tool":
            items.append(Turn("", "", [_CALL]))
        if role != "user":
            items.append(Context(self._message(role)))
        plain = self._attempt(items, conversation, generation_prompt=False)
        opened = self._attempt(items, conversation)
        if plain is None or opened is None or not opened.startswith(plain):
            return None
        return opened[len(plain) :]

    def _samples(self, following: str, conversation: Conversation) -> list[_Sample]:
        """Every shape that renders; none at all where a template doesn't show long pieces as it shows short ones."""
        terminated = self._terminated(conversation)
        samples: list[_Sample] = []
        for shape in _SHAPES:
            short, long = (self._sample(shape, fill, following, conversation, terminated) for fill in (0, _LONG))
            if short != long:
                return []
            if short is not None:
                samples.append(short)
        return samples

    def _sample(
        self, shape: Turn, fill: int, following: str, conversation: Conversation, terminated: bool
    ) -> _Sample | None:
        """None where the template refuses this, or shows nothing of it."""
        turn = self._renderer.mark(shape, 0, fill)
        if len(turn.calls) < len(shape.calls):
            return None
        context = self._attempt([_USER], conversation, generation_prompt=False)
        ended = self._attempt([_USER, turn], conversation, generation_prompt=False)
        text = self._attempt([_USER, turn, Context(self._message(following))], conversation)
        if ended is None or text is None:
            return None
        before, place = _only(ended, turn), _only(text, turn)
        if before is None or place is None:
            return None
        if not ended[: before.stop].endswith(text[place.start : place.stop]):
            return None  # the next message is shown within the turn
        closing = self._closing(ended, before.stop, terminated)
        tail_start = place.stop + len(closing)
        if not text.startswith(closing, place.stop) or not self._encoder.is_control_at(text, tail_start):
            return None
        opening = text[len(context) : place.start] if context is not None and text.startswith(context) else None
        shown = (place.thinking, place.text, place.calls)
        return _Sample(bool(turn.calls), shown, place.last, closing, text[tail_start:], opening)

    def _closing(self, ended: str, start: int, terminated: bool) -> str:
        """Of a conversation that ends with a turn: what closes the turn, up to its end token (the last control token
        there is: markup that closes a call comes before it)."""
        controls = list(self._encoder.controls(ended, start)) if terminated else []
        return ended[start : controls[-1].start()] if controls else ended[start:]

    def _terminated(self, conversation: Conversation) -> bool:
        """Whether turns have an end token at all, and are not just followed by the next message's opening."""
        turn = self._renderer.mark(Turn("", "t", []), 0)
        ended = self._attempt([_USER, turn], conversation, generation_prompt=False)
        place = None if ended is None else _only(ended, turn)
        if ended is None or place is None:
            return True
        return next(self._encoder.controls(ended, place.stop), None) is not None

    def _attempt(self, items: list[Item], like: Conversation, *, generation_prompt: bool = True) -> str | None:
        """A small conversation, in the way of a request. One of its tools is as good as all."""
        tools = like.tools[:1] if like.tools is not None else None
        return self._renderer.attempt(Conversation(items, tools, like.kwargs), generation_prompt=generation_prompt)

    def _message(self, role: str) -> ChatMessage:
        if role == "tool":
            return {"role": "tool", "content": "n", "tool_call_id": self._call_id(_CALL.name, 0), "name": _CALL.name}
        return {"role": role, "content": "n"}


_USER = Context({"role": "user", "content": "q"})


def _prove(samples: list[_Sample], last: Piece, calls: bool) -> Seam | None:
    if len({sample.tail for sample in samples}) != 1:
        samples = [sample for sample in samples if sample.calls == calls]
    closings = frozenset(sample.closing for sample in samples if sample.last == last)
    openings = frozenset(sample.opening for sample in samples if sample.opening is not None)
    if len(samples) < 2 or len({sample.tail for sample in samples}) != 1 or not closings:
        return None
    return Seam(closings, openings)


def _variant(conversation: Conversation) -> tuple[Any, ...]:
    """What a rendering depends on besides the messages; which tools they are doesn't matter for a seam."""
    return (conversation.tools is not None, json.dumps(conversation.kwargs, sort_keys=True))


def _only(text: str, turn: Turn) -> Place | None:
    found = read(text, [turn])
    return found.places[0] if found.ordered else None

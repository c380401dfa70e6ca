"""How a template goes on behind a model's turn: proved once, so that a turn costs one rendering.

    ... (last piece of the turn) closing  end token  the next message  opening of the next turn
                                          `------------------- tail -------------------------´

Recorded ids can be extended by `encode(tail)` only if the tail doesn't depend on the turn. That is proved by rendering
a small conversation with turns of several shapes, each with short pieces and with long ones:

- the tails must be equal, and at least two shapes must render. Those that a template refuses, or shows nothing of,
  don't count;
- the next message must stand behind the turn;
- long pieces must be shown whole and unchanged, wherever short ones are shown.

Templates may treat turns with calls and turns without, or turns that end with different pieces, in different ways; then
only shapes of one kind count for each other. What isn't proved isn't used.
"""

import contextlib
import json
import secrets
from typing import Any

from msgspec import Struct

from polar.rendering.encoder import PromptEncoder
from polar.rendering.messages import ContextMessage, Conversation, Item, MakeCallId, ModelTurn
from polar.rendering.skeleton import PieceKind, Renderer, read_skeleton
from polar.rendering.template import ChatMessage
from polar.types import ToolCall

_PROBE_NAME = f"probe{secrets.token_hex(6)}"
_PROBE_MESSAGE = f"next{secrets.token_hex(6)}"
_MAX_CACHED_VARIANTS = 512
_LONG_REPEATS = 250
"""How often long pieces repeat their text: some thousand characters."""


class Seam(Struct, frozen=True):
    """How text goes on behind a turn: one of `closings`, then the tail. It begins with the end token; in templates
    without one, with the next message's opening. Where a call's name or id is shown, it is that of the probe."""

    closings: frozenset[str]
    openings: frozenset[str]  # what stands between the context and a turn's first piece


class _RenderedShape(Struct):
    """One shape, rendered; without the rest where it shows that the template isn't as it has to be."""

    has_calls: bool
    place: tuple[PieceKind, bool, bool, bool] | None = None
    closing: str = ""
    tail: str = ""
    opening: str | None = None


class SeamProver:
    """Threads share one: another may forget all at any time, so what was found out is handed on, never read back."""

    def __init__(self, renderer: Renderer, encoder: PromptEncoder, make_call_id: MakeCallId) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self.tokenizer_fingerprint = encoder.fingerprint
        self._calls = [ToolCall(make_call_id(_PROBE_NAME, number), _PROBE_NAME, '{"a": 1}') for number in (0, 1)]
        one = self._calls[:1]
        self._shapes = (
            ModelTurn("", "t", []),
            ModelTurn("r", "t", []),
            ModelTurn("r", "", []),
            ModelTurn("", "", one),
            ModelTurn("", "t", one),
            ModelTurn("r", "", one),
            ModelTurn("r", "t", one),
            ModelTurn("", "", self._calls),
        )
        self._shape_cache: dict[tuple[Any, ...], list[_RenderedShape]] = {}
        self._seam_cache: dict[tuple[Any, ...], Seam | None] = {}
        self._openings: dict[tuple[Any, ...], str | None] = {}

    def trim_caches(self) -> None:
        """Requests choose the template's variables (how much to think, say): there may be any number of them."""
        for proved in (self._shape_cache, self._seam_cache, self._openings):
            if len(proved) > _MAX_CACHED_VARIANTS:
                proved.clear()

    def prove_seam(
        self, last: PieceKind, calls: bool, following: str | None, conversation: Conversation
    ) -> Seam | None:
        """Behind a turn whose last visible piece is `last`, before a message of role `following`, or (None) before the
        generation prompt; None where it isn't proved."""
        key = (last, calls, following, *_make_variant_key(conversation))
        with contextlib.suppress(KeyError):
            return self._seam_cache[key]
        samples = _select_shapes(self._get_shapes(following, conversation), last, calls)
        # Some templates show a turn in another way once there is a new question.
        later = _select_shapes(self._get_shapes("user", conversation), last, calls)
        closings = frozenset(sample.closing for sample in samples if sample.place and sample.place[0] == last)
        openings = frozenset(sample.opening for sample in samples + later if sample.opening is not None)
        proved = self._seam_cache[key] = Seam(closings, openings) if closings and len(samples) > 1 else None
        return proved

    def find_tail(self, seam: Seam, turn: ModelTurn, text: str, stop: int) -> int | None:
        """Where the tail begins, behind a turn whose last piece ends at `stop`."""
        for closing in seam.closings:
            closing = self._substitute_call(closing, turn, -1)
            if text.startswith(closing, stop) and self._encoder.is_control_at(text, stop + len(closing)):
                return stop + len(closing)
        return None

    def list_openings(self, seam: Seam, turn: ModelTurn) -> set[str]:
        return {self._substitute_call(opening, turn, 0) for opening in seam.openings}

    def _substitute_call(self, text: str, turn: ModelTurn, index: int) -> str:
        """What the template writes for the probe's call, as it writes it for this one."""
        if not turn.calls:
            return text
        call = turn.calls[index]
        for probe in self._calls:
            text = text.replace(probe.id, call.id)
        return text.replace(_PROBE_NAME, call.name)

    def find_opening(self, conversation: Conversation) -> str | None:
        """The generation prompt: what the template adds for the model to go on from. None where it isn't just added."""
        last = conversation.items[-1] if conversation.items else None
        return self.find_opening_after(
            last.message["role"] if isinstance(last, ContextMessage) else "assistant", conversation
        )

    def find_opening_after(self, role: str, conversation: Conversation) -> str | None:
        key = (role, *_make_variant_key(conversation))
        with contextlib.suppress(KeyError):
            return self._openings[key]
        opening = self._openings[key] = self._render_opening(role, conversation)
        return opening

    def _render_opening(self, role: str, conversation: Conversation) -> str | None:
        items: list[Item] = [_USER]
        if role == "assistant":
            items.append(ModelTurn("", "t", []))  # the model is to go on behind a turn of its own, which is over
        if role == "tool":
            items.append(ModelTurn("", "", self._calls[:1]))
        if role not in ("user", "assistant"):
            items.append(ContextMessage(self._make_message(role)))
        plain = self._try_render(items, conversation, generation_prompt=False)
        opened = self._try_render(items, conversation)
        if plain is None or opened is None or not opened.startswith(plain):
            return None
        return opened[len(plain) :]

    def _get_shapes(self, following: str | None, conversation: Conversation) -> list[_RenderedShape]:
        key = (following, *_make_variant_key(conversation))
        with contextlib.suppress(KeyError):
            return self._shape_cache[key]
        samples = self._shape_cache[key] = self._render_shapes(following, conversation)
        return samples

    def _render_shapes(self, following: str | None, conversation: Conversation) -> list[_RenderedShape]:
        terminated = self._has_end_token(conversation)
        samples: list[_RenderedShape] = []
        for shape in self._shapes:
            short, long = (
                self._render_shape(shape, fill, following, conversation, terminated) for fill in (0, _LONG_REPEATS)
            )
            if short != long:
                samples.append(_RenderedShape(bool(shape.calls)))
            elif short is not None:
                samples.append(short)
        return samples

    def _render_shape(
        self, shape: ModelTurn, fill: int, following: str | None, conversation: Conversation, terminated: bool
    ) -> _RenderedShape | None:
        """None where the template refuses this, or shows nothing of it."""
        turn = self._renderer.mark_turn(shape, 0, fill)
        if len(turn.calls) < len(shape.calls):
            return None
        context = self._try_render([_USER], conversation, generation_prompt=False)
        ended = self._try_render([_USER, turn], conversation, generation_prompt=False)
        after: list[Item] = [] if following is None else [ContextMessage(self._make_message(following))]
        text = self._try_render([_USER, turn, *after], conversation)
        if ended is None or text is None:
            return None
        alone, between = read_skeleton(ended, [turn]), read_skeleton(text, [turn])
        before, place = alone.turn_spans[0], between.turn_spans[0]
        if before is None or place is None:
            return None
        closing = self._find_closing(ended, before.stop, terminated)
        tail_start = place.stop + len(closing)
        if (
            not (alone.is_ordered and between.is_ordered)
            or _PROBE_MESSAGE in text[:tail_start]
            or not text.startswith(closing, place.stop)
            or not self._encoder.is_control_at(text, tail_start)
        ):
            return _RenderedShape(bool(turn.calls))
        opening = text[len(context) : place.start] if context is not None and text.startswith(context) else None
        seen = (place.last_piece, place.shows_thinking, place.shows_text, place.shows_calls)
        return _RenderedShape(bool(turn.calls), seen, closing, text[tail_start:], opening)

    def _find_closing(self, ended: str, start: int, terminated: bool) -> str:
        """Of a conversation that ends with a turn: what closes the turn, up to its end token (the last control token
        there is: markup that closes a call comes before it)."""
        controls = list(self._encoder.find_controls(ended, start)) if terminated else []
        return ended[start : controls[-1].start()] if controls else ended[start:]

    def _has_end_token(self, conversation: Conversation) -> bool:
        """Whether turns have an end token at all, and are not just followed by the next message's opening."""
        turn = self._renderer.mark_turn(ModelTurn("", "t", []), 0)
        ended = self._try_render([_USER, turn], conversation, generation_prompt=False)
        place = None if ended is None else read_skeleton(ended, [turn]).turn_spans[0]
        if ended is None or place is None:
            return True
        return next(self._encoder.find_controls(ended, place.stop), None) is not None

    def _try_render(self, items: list[Item], like: Conversation, *, generation_prompt: bool = True) -> str | None:
        """A small conversation, in the way of a request. One of its tools is as good as all."""
        tools = like.tools[:1] if like.tools is not None else None
        return self._renderer.try_render(Conversation(items, tools, like.kwargs), generation_prompt=generation_prompt)

    def _make_message(self, role: str) -> ChatMessage:
        if role == "tool":
            return {"role": "tool", "content": _PROBE_MESSAGE, "tool_call_id": self._calls[0].id, "name": _PROBE_NAME}
        return {"role": role, "content": _PROBE_MESSAGE}


_USER = ContextMessage({"role": "user", "content": "q"})


def _select_shapes(samples: list[_RenderedShape], last: PieceKind, calls: bool) -> list[_RenderedShape]:
    """Those that count for turns of one kind: all if they agree, else those of the kind if these do, else none."""
    if _have_one_tail(samples):
        return samples
    samples = [s for s in samples if s.has_calls == calls and (s.place is None or s.place[0] == last)]
    return samples if _have_one_tail(samples) else []


def _have_one_tail(samples: list[_RenderedShape]) -> bool:
    return all(sample.place is not None for sample in samples) and len({sample.tail for sample in samples}) == 1


def _make_variant_key(conversation: Conversation) -> tuple[Any, ...]:
    """What a rendering depends on besides the messages; which tools they are doesn't matter for a seam."""
    kwargs = conversation.kwargs
    return (conversation.tools is not None, json.dumps(kwargs, sort_keys=True) if kwargs else "")

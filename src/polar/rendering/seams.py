"""Proves how a template continues behind a model's turn, once, so that a turn costs one rendering.

    ... (last piece of the turn) closing  end token  the next message  opening of the next turn
                                          `------------------- tail -------------------------´

Recorded ids can be extended by `encode(tail)` only if the tail doesn't depend on the turn. That is proved by rendering
a small conversation with turns of several shapes, each with short pieces and with long ones:

- the tails must be equal, and at least two shapes must render. Those that a template refuses, or shows nothing of,
  don't count;
- the next message must stand behind the turn;
- long pieces must be shown whole and unchanged, wherever short ones are shown.

Templates may treat turns with calls and turns without, or turns that end with different pieces, in different ways; then
only shapes of one kind count for each other. A tail that isn't proved isn't used.
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
"""How often long pieces repeat their text, which makes some thousand characters."""


class Seam(Struct, frozen=True):
    """How the text continues behind a turn: one of `closings`, then the tail, which begins with the end token or, in
    templates without one, with the next message's opening. A call's name and id in these texts are the probe's."""

    closings: frozenset[str]
    openings: frozenset[str]  # texts between the context and a turn's first piece


class _RenderedShape(Struct):
    """One shape, rendered. It has only `has_calls` if its rendering proves nothing."""

    has_calls: bool
    pieces: tuple[PieceKind, bool, bool, bool] | None = None  # the last piece, and which kinds are shown
    closing: str = ""
    tail: str = ""
    opening: str | None = None


class SeamProver:
    """Shared by threads. Another thread may clear the caches at any time, so results are returned, never read back."""

    def __init__(self, renderer: Renderer, encoder: PromptEncoder, make_call_id: MakeCallId) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self.tokenizer_fingerprint = encoder.fingerprint
        self._calls = [ToolCall(make_call_id(_PROBE_NAME, number), _PROBE_NAME, '{"a": 1}') for number in (0, 1)]
        single_call = self._calls[:1]
        self._shapes = (
            ModelTurn("", "t", []),
            ModelTurn("r", "t", []),
            ModelTurn("r", "", []),
            ModelTurn("", "", single_call),
            ModelTurn("", "t", single_call),
            ModelTurn("r", "", single_call),
            ModelTurn("r", "t", single_call),
            ModelTurn("", "", self._calls),
        )
        self._shape_cache: dict[tuple[Any, ...], list[_RenderedShape]] = {}
        self._seam_cache: dict[tuple[Any, ...], Seam | None] = {}
        self._openings: dict[tuple[Any, ...], str | None] = {}

    def trim_caches(self) -> None:
        """Bounds the caches: requests choose the template's variables (how much to think, say), so there may be any
        number of variants."""
        for cache in (self._shape_cache, self._seam_cache, self._openings):
            if len(cache) > _MAX_CACHED_VARIANTS:
                cache.clear()

    def prove_seam(
        self, last_piece: PieceKind, has_calls: bool, following: str | None, conversation: Conversation
    ) -> Seam | None:
        """Returns the seam behind a turn whose last visible piece is `last_piece`, before a message of role `following`
        or, if that is None, before the generation prompt. Returns None if it can't be proved."""
        key = (last_piece, has_calls, following, *_make_variant_key(conversation))
        with contextlib.suppress(KeyError):
            return self._seam_cache[key]
        samples = _select_shapes(self._get_shapes(following, conversation), last_piece, has_calls)
        # Some templates show a turn in another way once there is a new question.
        before_user = _select_shapes(self._get_shapes("user", conversation), last_piece, has_calls)
        closings = frozenset(sample.closing for sample in samples if sample.pieces and sample.pieces[0] == last_piece)
        openings = frozenset(sample.opening for sample in samples + before_user if sample.opening is not None)
        seam = self._seam_cache[key] = Seam(closings, openings) if closings and len(samples) > 1 else None
        return seam

    def find_tail(self, seam: Seam, turn: ModelTurn, text: str, stop: int) -> int | None:
        """Returns where the tail begins behind a turn whose last piece ends at `stop`, or None if it has no closing of
        the seam."""
        for closing in seam.closings:
            closing = self._substitute_call(closing, turn, -1)
            if text.startswith(closing, stop) and self._encoder.is_control_at(text, stop + len(closing)):
                return stop + len(closing)
        return None

    def list_openings(self, seam: Seam, turn: ModelTurn) -> set[str]:
        return {self._substitute_call(opening, turn, 0) for opening in seam.openings}

    def _substitute_call(self, text: str, turn: ModelTurn, index: int) -> str:
        """Replaces the probe's call in a template's text by the turn's call."""
        if not turn.calls:
            return text
        call = turn.calls[index]
        for probe in self._calls:
            text = text.replace(probe.id, call.id)
        return text.replace(_PROBE_NAME, call.name)

    def find_opening(self, conversation: Conversation) -> str | None:
        """Returns the generation prompt: the text that the template appends for the model to continue. Returns None if
        the template changes other text for it."""
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
            items.append(ModelTurn("", "t", []))  # the model continues behind a finished turn of its own
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
        """Returns None if the template refuses the shape, or shows nothing of it."""
        turn = self._renderer.mark_turn(shape, 0, fill)
        if len(turn.calls) < len(shape.calls):
            return None
        context = self._try_render([_USER], conversation, generation_prompt=False)
        ended = self._try_render([_USER, turn], conversation, generation_prompt=False)
        next_items: list[Item] = [] if following is None else [ContextMessage(self._make_message(following))]
        text = self._try_render([_USER, turn, *next_items], conversation)
        if ended is None or text is None:
            return None
        ended_skeleton, skeleton = read_skeleton(ended, [turn]), read_skeleton(text, [turn])
        last_span, turn_span = ended_skeleton.turn_spans[0], skeleton.turn_spans[0]
        if last_span is None or turn_span is None:
            return None
        closing = self._find_closing(ended, last_span.stop, terminated)
        tail_start = turn_span.stop + len(closing)
        if (
            not (ended_skeleton.is_ordered and skeleton.is_ordered)
            or _PROBE_MESSAGE in text[:tail_start]
            or not text.startswith(closing, turn_span.stop)
            or not self._encoder.is_control_at(text, tail_start)
        ):
            return _RenderedShape(bool(turn.calls))
        opening = text[len(context) : turn_span.start] if context is not None and text.startswith(context) else None
        pieces = (turn_span.last_piece, turn_span.shows_thinking, turn_span.shows_text, turn_span.shows_calls)
        return _RenderedShape(bool(turn.calls), pieces, closing, text[tail_start:], opening)

    def _find_closing(self, ended: str, start: int, terminated: bool) -> str:
        """Returns the text that closes the turn at the end of a conversation, up to its end token. That is the last
        control token: markup that closes a call comes before it."""
        controls = list(self._encoder.find_controls(ended, start)) if terminated else []
        return ended[start : controls[-1].start()] if controls else ended[start:]

    def _has_end_token(self, conversation: Conversation) -> bool:
        """Whether turns end with an end token, or are just followed by the next message's opening."""
        turn = self._renderer.mark_turn(ModelTurn("", "t", []), 0)
        ended = self._try_render([_USER, turn], conversation, generation_prompt=False)
        turn_span = None if ended is None else read_skeleton(ended, [turn]).turn_spans[0]
        if ended is None or turn_span is None:
            return True
        return next(self._encoder.find_controls(ended, turn_span.stop), None) is not None

    def _try_render(self, items: list[Item], like: Conversation, *, generation_prompt: bool = True) -> str | None:
        """Renders a small conversation with the tools and variables of another one. One of its tools is enough."""
        tools = like.tools[:1] if like.tools is not None else None
        return self._renderer.try_render(Conversation(items, tools, like.kwargs), generation_prompt=generation_prompt)

    def _make_message(self, role: str) -> ChatMessage:
        if role == "tool":
            return {"role": "tool", "content": _PROBE_MESSAGE, "tool_call_id": self._calls[0].id, "name": _PROBE_NAME}
        return {"role": role, "content": _PROBE_MESSAGE}


_USER = ContextMessage({"role": "user", "content": "q"})


def _select_shapes(samples: list[_RenderedShape], last_piece: PieceKind, has_calls: bool) -> list[_RenderedShape]:
    """Selects the shapes that count for turns of one kind: all of them if they have one tail; otherwise those of the
    kind, if these have one; otherwise none."""
    if _have_one_tail(samples):
        return samples
    samples = [s for s in samples if s.has_calls == has_calls and (s.pieces is None or s.pieces[0] == last_piece)]
    return samples if _have_one_tail(samples) else []


def _have_one_tail(samples: list[_RenderedShape]) -> bool:
    return all(sample.pieces is not None for sample in samples) and len({sample.tail for sample in samples}) == 1


def _make_variant_key(conversation: Conversation) -> tuple[Any, ...]:
    """Makes a key of what a rendering depends on besides the messages. Which tools there are doesn't matter."""
    kwargs = conversation.kwargs
    return (conversation.tools is not None, json.dumps(kwargs, sort_keys=True) if kwargs else "")

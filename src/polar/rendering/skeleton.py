"""A rendering with the model's turns replaced by marks, which shows the context alone, and where the turns stand in it.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n(mark)<|im_end|>\\n<|im_start|>user\\n...
    `--------------------- context -----------------------´      `------------- tail ------------...

Each piece of a turn (thinking, text, a call's arguments) has a mark of its own, so the rendering also tells which
pieces the template shows: one that strips earlier thinking shows no mark there. A turn of which no mark is left is
rendered as it is: whatever the template makes of it is context like any other text.

A mark can be filled with more text. It is found only if all of that is there, as it was: so a template that cuts,
escapes or rewrites what a model said is found out (seams.py).
"""

import re
import secrets
from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from polar.rendering.messages import ContextMessage, Conversation, Item, ModelTurn, TemplateTraits, to_chat_message
from polar.rendering.template import ChatMessage, ChatTemplate, TemplateError
from polar.types import ToolCall

PieceKind = Literal["r", "c", "a"]
"""Thinking, text (content), or a call's arguments."""

_MARK_PREFIX = f"Polar{secrets.token_hex(6)}"
_PROSE = "Aa é\n\n <b>&amp;"
_VALUE = "Aa  <b>&amp;"  # nothing that JSON writes otherwise
_MARK_PATTERN = re.compile(f"{_MARK_PREFIX}([rca])(\\d+)x((?:{re.escape(_PROSE)}|{re.escape(_VALUE)})*)X")


class TurnSpan(NamedTuple):
    """Where a turn stands in the rendered text, and what of it is shown."""

    start: int  # of its first mark
    stop: int  # behind its last mark
    last_piece: PieceKind
    shows_thinking: bool
    shows_text: bool
    shows_calls: bool


class Skeleton(Struct):
    text: str
    turn_spans: list[TurnSpan | None]  # for each marked turn; None where nothing of it is shown
    is_ordered: bool  # turns stand in the order of the conversation, none within another, no piece twice


class Renderer:
    """A template as this model's requests are rendered with it."""

    def __init__(self, template: ChatTemplate, traits: TemplateTraits) -> None:
        self._template = template
        self.traits = traits

    def render(self, conversation: Conversation, *, generation_prompt: bool = True) -> str:
        """Raises TemplateError where the template refuses."""
        return self._template.render(
            self._build_messages(conversation.items),
            conversation.tools,
            generation_prompt,
            map_arguments=self.traits.maps_arguments,
            **conversation.kwargs,
        )

    def try_render(self, conversation: Conversation, *, generation_prompt: bool = True) -> str | None:
        try:
            return self.render(conversation, generation_prompt=generation_prompt)
        except TemplateError:
            return None

    def render_skeleton(self, conversation: Conversation, turns: int | None = None) -> Skeleton:
        """Renders with marks for the first `turns` turns (default: all). Turns that the template does not show are
        rendered as they are."""
        skeleton = self._render_skeleton(conversation, turns, hidden=())
        hidden = [number for number, turn_span in enumerate(skeleton.turn_spans) if turn_span is None]
        return self._render_skeleton(conversation, turns, hidden) if hidden else skeleton

    def _render_skeleton(self, conversation: Conversation, turns: int | None, hidden: Container[int]) -> Skeleton:
        items: list[Item] = []
        marked: list[ModelTurn] = []
        for item in conversation.items:
            if isinstance(item, ModelTurn) and (turns is None or len(marked) < turns):
                shape = self.mark_turn(item, len(marked))
                item = item if len(marked) in hidden else shape
                marked.append(shape)
            items.append(item)
        return read_skeleton(self.render(Conversation(items, conversation.tools, conversation.kwargs)), marked)

    def mark_turn(self, turn: ModelTurn, number: int, fill: int = 0) -> ModelTurn:
        """Replaces a turn's pieces by marks; `fill` makes the marks longer."""
        calls = turn.calls if self.traits.supports_parallel_calls else turn.calls[:1]
        value = f"{_MARK_PREFIX}a{number}x{_VALUE * fill}X"
        arguments = f'{{"{value}": "{value}"}}'
        return ModelTurn(
            f"{_MARK_PREFIX}r{number}x{_PROSE * fill}X" if turn.reasoning else "",
            f"{_MARK_PREFIX}c{number}x{_PROSE * fill}X" if turn.text else "",
            [ToolCall(call.id, call.name, arguments) for call in calls],
        )

    def _build_messages(self, items: Sequence[Item]) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        placed_results = 0  # results that stand with their calls already
        for index, item in enumerate(items):
            if isinstance(item, ContextMessage):
                if placed_results:
                    placed_results -= 1
                else:
                    messages.append(item.message)
            elif len(item.calls) > 1 and not self.traits.supports_parallel_calls:
                split = self._split_calls(item, items[index + 1 :])
                messages += split
                placed_results = sum(message["role"] == "tool" for message in split)
            else:
                messages.append(to_chat_message(item))
        return messages

    def _split_calls(self, turn: ModelTurn, following: Sequence[Item]) -> list[ChatMessage]:
        """Splits a turn with several calls for a template that takes one: each call is followed by its result."""
        messages: list[ChatMessage] = []
        for index, call in enumerate(turn.calls):
            reasoning, text = (turn.reasoning, turn.text) if index == 0 else ("", "")
            messages.append(to_chat_message(ModelTurn(reasoning, text, [call])))
            result = following[index] if index < len(following) else None
            if not isinstance(result, ContextMessage) or result.message["role"] != "tool":
                break  # the remaining calls were never answered
            messages.append(result.message)
        return messages


def read_skeleton(text: str, marked: Sequence[ModelTurn]) -> Skeleton:
    """Finds the marks of turns in a rendering."""
    marks_by_turn: list[list[re.Match[str]]] = [[] for _ in marked]
    order: list[int] = []
    for mark in _MARK_PATTERN.finditer(text):
        number = int(mark.group(2))
        marks_by_turn[number].append(mark)
        if not order or order[-1] != number:
            order.append(number)
    turn_spans = [
        _find_turn_span(turn, marks) if marks else None for turn, marks in zip(marked, marks_by_turn, strict=True)
    ]
    shown_once = all(map(_is_shown_once, marked, marks_by_turn))
    return Skeleton(text, turn_spans, shown_once and order == sorted(set(order)))


def _is_shown_once(turn: ModelTurn, marks: Sequence[re.Match[str]]) -> bool:
    """Whether no piece is shown more than once. A piece that the template repeats is used outside its turn."""
    shown = [mark.group(1) for mark in marks]
    return shown.count("r") <= 1 and shown.count("c") <= 1 and shown.count("a") <= 2 * len(turn.calls)


def _find_turn_span(turn: ModelTurn, marks: Sequence[re.Match[str]]) -> TurnSpan:
    shown = [mark.group(1) for mark in marks]
    shows_text = "c" in shown
    last_piece: Any = shown[-1]
    # Each call's arguments have two marks, key and value. Calls that were written into the text are shown with it.
    shows_calls = shown.count("a") >= 2 * len(turn.calls) if turn.calls else shows_text
    return TurnSpan(marks[0].start(), marks[-1].end(), last_piece, "r" in shown, shows_text, shows_calls)

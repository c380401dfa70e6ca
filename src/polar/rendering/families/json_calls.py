"""Families that write a call as JSON between markers of their own. A family is its table of markers and one function:
what stands between them."""

import json
import re
from collections.abc import Sequence

from polar.rendering.families.base import FamilySigns, ParsedCall
from polar.rendering.families.json_text import is_json, read_call, read_calls
from polar.rendering.families.markup import MarkupFamily, MarkupParser
from polar.rendering.families.scanner import FoundMarker, Piece, join_pieces, split_at_marker
from polar.types import Tool

_KIMI_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+):\d+\s*")
_DECODER = json.JSONDecoder()
_LLAMA_SEPARATOR = re.compile(r"\s*(?:;\s*|\Z)")
_LLAMA_BEGINNINGS = ('{"name":"', '{"type":"function","name":"')  # white space left out
_MAX_BEGINNING_CHARACTERS = 100


class Hermes(MarkupFamily):
    """Hermes, Qwen2.5, Qwen3 and SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    name = "hermes"
    call_markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return "<tool_call>" in signs.template

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        call = read_call(join_pieces(body))
        return None if call is None else [call]


class Kimi(MarkupFamily):
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

    The number counts the calls of the conversation: the model writes the id that it will be shown again.
    """

    name = "kimi"
    call_markers = ("<|tool_call_begin|>", "<|tool_call_end|>")
    section_markers = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    inner_markers = ("<|tool_call_argument_begin|>",)

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("<|tool_call_argument_begin|>")

    def make_call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        head, *rest = split_at_marker(body, "<|tool_call_argument_begin|>")
        id = _KIMI_ID.fullmatch(join_pieces(head))
        arguments = join_pieces(rest[0]).strip() if len(rest) == 1 else ""
        return [ParsedCall(id.group(1), arguments, join_pieces(head).strip())] if id and is_json(arguments) else None


class DeepSeek(MarkupFamily):
    """DeepSeek V3, R1 and V3.1: calls in a section, each between markers.

    V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fenced block of JSON; V3.1 writes
    `name<｜tool▁sep｜>{...}`.
    """

    name = "deepseek"
    call_markers = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    section_markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner_markers = ("<｜tool▁sep｜>",)

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("<｜tool▁sep｜>")

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        head, *rest = split_at_marker(body, "<｜tool▁sep｜>")
        if len(rest) != 1:
            return None
        name, arguments = join_pieces(head).strip(), join_pieces(rest[0]).strip()
        if name == "function" and arguments.endswith("```"):
            name, _, arguments = arguments.removesuffix("```").partition("```json")
            name, arguments = name.strip(), arguments.strip()
        return [ParsedCall(name, arguments)] if name and is_json(arguments) else None


class Mistral(MarkupFamily):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls.

    Later models write `[TOOL_CALLS]name[ARGS]{...}` for each call.
    """

    name = "mistral"
    call_markers = ("[TOOL_CALLS]", "")
    inner_markers = ("[CALL_ID]", "[ARGS]")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return signs.has_marker("[TOOL_CALLS]")

    def make_call_id(self, name: str, number: int) -> str:  # noqa: ARG002
        return f"call{number:05}"  # nine letters and digits: the templates take no other ids

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        if calls := read_calls(join_pieces(body)):
            return calls
        head, *rest = split_at_marker(body, "[ARGS]")
        name, *ids = (join_pieces(piece).strip() for piece in split_at_marker(head, "[CALL_ID]"))
        arguments = join_pieces(rest[0]).strip() if len(rest) == 1 else ""
        return [ParsedCall(name, arguments, ids[0] if ids else None)] if name and is_json(arguments) else None


class Llama(MarkupFamily):
    """Llama 3.x: JSON with a name and parameters, behind `<|python_tag|>` or as the whole turn.

    Several calls are separated by `;`. Without the tag, a turn is a call if it begins as one, so JSON that an answer
    holds further on stays text. Code behind the tag is no call of a function: it goes on as text, flagged.
    """

    name = "llama"
    call_markers = ("<|python_tag|>", "")

    @classmethod
    def matches(cls, signs: FamilySigns) -> bool:
        return "<|python_tag|>" in signs.tokens and "parameters" in signs.template

    def parse_calls(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[ParsedCall] | None:  # noqa: ARG002
        text = join_pieces(body).strip()
        calls: list[ParsedCall] = []
        at = 0
        while at < len(text):
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            call = read_call(text[at:end], "parameters") or read_call(text[at:end])
            separator = _LLAMA_SEPARATOR.match(text, end)
            if call is None or separator is None:
                return None
            calls.append(call)
            at = separator.end()
        return calls or None

    def make_parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> "LlamaParser":
        return LlamaParser(self, prompt_end, tools or ())


class LlamaParser(MarkupParser):
    """Text where the turn begins is held back until it is known whether it is the beginning of a call."""

    def __init__(self, family: Llama, prompt_end: str, tools: Sequence[Tool]) -> None:
        super().__init__(family, prompt_end, tools)
        self._undecided = bool(tools)
        self._beginning = ""

    def _add_text(self, text: str) -> None:
        if not self._undecided or self._in_reasoning or (not self._beginning and text.isspace()):
            super()._add_text(text)
            return
        self._beginning += text
        written = "".join(self._beginning.split())
        if any(written.startswith(beginning) for beginning in _LLAMA_BEGINNINGS):
            self._open_call([])
            self._body = [self._beginning]
            self._beginning, self._undecided = "", False
        elif len(self._beginning) > _MAX_BEGINNING_CHARACTERS or not any(
            beginning.startswith(written) for beginning in _LLAMA_BEGINNINGS
        ):
            self._decide_for_text()

    def _read_marker(self, mark: FoundMarker) -> None:
        if not self._in_reasoning:
            self._decide_for_text()
        super()._read_marker(mark)

    def _end_turn(self) -> None:
        self._decide_for_text()
        super()._end_turn()

    def _decide_for_text(self) -> None:
        text, self._beginning, self._undecided = self._beginning, "", False
        if text:
            super()._add_text(text)

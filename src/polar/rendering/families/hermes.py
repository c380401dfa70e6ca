"""Hermes, Qwen2.5, Qwen3 and SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Sequence

from polar.rendering.families.base import Call, Signs
from polar.rendering.families.json_text import read_call
from polar.rendering.families.markup import Markup
from polar.rendering.families.scanner import Piece, spelled
from polar.types import Tool


class Hermes(Markup):
    name = "hermes"
    call = ("<tool_call>", "</tool_call>")

    @classmethod
    def fits(cls, signs: Signs) -> bool:
        return "<tool_call>" in signs.template

    def read(self, body: Sequence[Piece], tools: Sequence[Tool]) -> list[Call] | None:  # noqa: ARG002
        call = read_call(spelled(body))
        return None if call is None else [call]

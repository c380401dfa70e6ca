"""Models to talk with: a tokenizer, its template, and how a model of it writes a turn, to the template's letter."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer
from tests.unit.rendering.families.models import fixture, model, small

Calls = Sequence[tuple[str, dict[str, Any]]]


class Says(NamedTuple):
    """A turn, apart from its markup."""

    thinking: str = ""
    text: str = ""
    calls: Calls = ()


class Talker(NamedTuple):
    tokenizer: Callable[[], Tokenizer]
    write: Callable[[Says], str]
    thinks: bool = False
    keeps_thinking: bool = True  # behind a new question
    calls: bool = True
    many_calls: bool = True
    text_beside_calls: bool = True

    def able(self, says: Says) -> Says:
        """What this model can say of it."""
        calls = says.calls if self.calls else ()
        calls = calls if self.many_calls else calls[:1]
        text = says.text if self.text_beside_calls or not calls else ""
        thinking = says.thinking if self.thinks else ""
        return Says(thinking, text or ("" if calls or thinking else "Well."), calls)


def _json(calls: Calls, form: str) -> list[str]:
    return [form % (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


def write_scripted(says: Says, end: str = "<|im_end|>") -> str:
    thinking = f"<think>{says.thinking}</think>" if says.thinking else ""
    calls = _json(says.calls, '<tool_call>{"name": "%s", "arguments": %s}</tool_call>')
    return thinking + says.text + "".join(calls) + end


def write_qwen(says: Says) -> str:
    thinking = f"<think>\n{says.thinking}\n</think>\n\n" if says.thinking else ""
    calls = _json(says.calls, '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>')
    return thinking + "\n".join([*([says.text] if says.text else []), *calls]) + "<|im_end|>"


def write_qwen35(says: Says) -> str:
    """Behind a prompt that opened the thinking."""
    calls = []
    for name, arguments in says.calls:
        pairs = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        calls.append(f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>")
    between = "\n\n" if says.text and calls else ""
    return f"{says.thinking}\n</think>\n\n{says.text}{between}" + "\n".join(calls) + "<|im_end|>"


def write_llama(says: Says) -> str:
    if says.calls:
        return "".join(_json(says.calls, '{"name": "%s", "parameters": %s}')) + "<|eot_id|>"
    return says.text + "<|eot_id|>"


def _write_spelled(end: str) -> Callable[[Says], str]:
    """For a template that knows no tools: the fallback's markup."""

    def write(says: Says) -> str:
        return write_qwen(Says("", says.text, says.calls)).removesuffix("<|im_end|>") + end

    return write


_SMOL = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@cache
def _qwen35() -> Tokenizer:
    """Its markup in the vocabulary of Qwen3, which has the same control tokens."""
    base = model("qwen3")
    return Tokenizer(base.backend, base.special_tokens, ChatTemplate(fixture("qwen35"), base.special_tokens))


@cache
def _smollm2() -> Tokenizer:
    return small(["<|im_start|>", "<|endoftext|>"], _SMOL, "<|im_end|>")


TALKERS = {
    "scripted": Talker(lambda: Tokenizer.load(TOKENIZER_FOLDER), write_scripted, thinks=True),
    "qwen3": Talker(lambda: model("qwen3"), write_qwen, thinks=True, keeps_thinking=False),
    "qwen35": Talker(_qwen35, write_qwen35, thinks=True, keeps_thinking=False),
    "qwen2_5": Talker(lambda: model("qwen2_5"), write_qwen),
    "llama3_2": Talker(lambda: model("llama3_2"), write_llama, many_calls=False, text_beside_calls=False),
    "gemma3": Talker(lambda: model("gemma3"), _write_spelled("<end_of_turn>")),
    "deepseek_v3": Talker(lambda: model("deepseek_v3"), _write_spelled("<｜end▁of▁sentence｜>")),
    "smollm2": Talker(_smollm2, _write_spelled("<|im_end|>")),
}

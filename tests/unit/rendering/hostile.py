"""Templates made up to be difficult, each for one reason. All of them write ChatML, in the vocabulary of the bundled
tokenizer, and models write their turns as `talkers.write_scripted` does."""

from typing import NamedTuple

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer

_TOOLS = """
{%- if tools -%}{{- '<|im_start|>system\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}
"""
_HEAD = "{{- '<|im_start|>' + message.role + '\n' -}}"
_THINK = "{{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content -}}"
_TEXT = "{{- message.content -}}"
_CALLS = """
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
"""
_END = "{{- '<|im_end|>\n' -}}"
_ASK = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"


def _template(
    tools: str = _TOOLS,
    before: str = "",
    head: str = _HEAD,
    think: str = _THINK,
    text: str = _TEXT,
    calls: str = _CALLS,
    end: str = _END,
    after: str = "",
    ask: str = _ASK,
    messages: str = "messages",
) -> str:
    message = head + think + text + calls + end
    return f"{tools}{before}{{%- for message in {messages} -%}}{message}{{%- endfor -%}}{after}{ask}"


class Hostile(NamedTuple):
    source: str
    result: str | None
    """Why the prompt behind a tool result branches; None if it goes on."""
    question: str | None
    """And behind a question."""


_DATE = "{{- strftime_now('%d %b %Y') -}}"

HOSTILE = {
    "plain": Hostile(_template(), None, None),
    # Contents
    "trims": Hostile(_template(text="{{- message.content | trim -}}"), None, None),
    "lower-cases": Hostile(_template(text="{{- message.content | lower -}}"), "not_proved", "not_proved"),
    "escapes": Hostile(_template(text="{{- message.content | e -}}"), "not_proved", "not_proved"),
    "cuts long text": Hostile(_template(text="{{- message.content[:100] -}}"), "not_proved", "not_proved"),
    "says everything twice": Hostile(_template(text=_TEXT + _TEXT), "not_proved", "not_proved"),
    "shows no calls": Hostile(_template(calls=""), None, None),  # so tools are spelled out
    "drops text beside calls": Hostile(
        _template(text="{{- message.content if not message.tool_calls -}}"), "text_dropped_by_template", None
    ),
    "thinks behind the text": Hostile(_template(think="", text=_TEXT + _THINK), None, None),
    # Thinking
    "drops thinking": Hostile(_template(think=""), "thinking_dropped_by_template", "thinking_dropped_by_template"),
    "drops earlier thinking": Hostile(
        _template(think=_THINK.replace("if message", "if loop.index0 > messages | length - 3 and message")),
        None,
        "thinking_dropped_by_template",
    ),
    "drops thinking behind a question": Hostile(
        _template(think=_THINK.replace("if message", "if messages[-1].role != 'user' and message")),
        None,
        "thinking_dropped_by_template",
    ),
    "empty thinking in the generation prompt": Hostile(
        _template(ask=_ASK.replace("assistant\n", "assistant\n<think></think>")), None, None
    ),
    # Order
    "system last": Hostile(
        _template(
            messages="messages if message.role != 'system'",
            after="{%- for message in messages if message.role == 'system' -%}"
            + _HEAD
            + _TEXT
            + _END
            + "{%- endfor -%}",
        ),
        None,  # such a place is none for system messages: they become user messages
        None,
    ),
    "reminder last": Hostile(
        _template(after="{{- '<|im_start|>system\n' + messages[0].content -}}" + _END),
        "context_changed",
        "context_changed",
    ),
    "results before calls": Hostile(
        _template(
            messages="messages if message.role != 'tool'",
            calls="{%- if message.tool_calls -%}{%- for each in messages if each.role == 'tool' -%}"
            "{{- '<tool_response>' + each.content + '</tool_response>' -}}{%- endfor -%}{%- endif -%}" + _CALLS,
        ),
        "not_proved",
        "not_proved",
    ),
    "next message in the turn": Hostile(
        _template(
            text="{{- loop.nextitem.content + ' ' if message.role == 'assistant' and loop.nextitem is defined -}}"
            "{{- message.content if loop.first or loop.previtem.role != 'assistant' -}}",
        ),
        "not_proved",
        "not_proved",
    ),
    "repeats the turn": Hostile(
        _template(head=_HEAD + "{{- loop.previtem.content if loop.previtem is defined -}}"), "not_proved", "not_proved"
    ),
    # Headers
    "counts messages": Hostile(
        _template(
            head="{{- '<|im_start|>' + message.role + ' ' + loop.index | string + '\n' -}}",
            ask=_ASK.replace("assistant\n", "assistant ' + (messages | length + 1) | string + '\n"),
        ),
        "unknown_turn",  # how its turns begin can't be found out from a smaller conversation, so none is remembered
        "unknown_turn",
    ),
    "counts what is left": Hostile(
        _template(head="{{- '<|im_start|>' + message.role + ' ' + loop.revindex | string + '\n' -}}"),
        "context_changed",
        "context_changed",
    ),
    "tells the length of the turn": Hostile(
        _template(
            head=_HEAD + "{{- loop.previtem.content | length if loop.previtem is defined "
            "and loop.previtem.role == 'assistant' -}}"
        ),
        "not_proved",
        "not_proved",
    ),
    "tells the length of the arguments": Hostile(
        _template(
            head=_HEAD + "{{- loop.previtem.tool_calls | tojson | length if loop.previtem is defined "
            "and loop.previtem.tool_calls -}}"
        ),
        "not_proved",
        "not_proved",
    ),
    "shows call ids": Hostile(
        _template(calls=_CALLS.replace('{"name', "' + call.id + '{\"name")),
        None,
        None,
    ),
    "date": Hostile(_template(before="{{- '<|im_start|>system\n' -}}" + _DATE + _END), None, None),
    "date in the header": Hostile(
        _template(
            head="{{- '<|im_start|>' + message.role + ' ' -}}" + _DATE + "{{- '\n' -}}",
            ask="{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' -}}"
            + _DATE
            + "{{- '\n' -}}{%- endif -%}",
        ),
        None,
        None,
    ),
    "date before the turn": Hostile(
        _template(
            head="{{- '<|im_start|>' + message.role -}}{%- if message.role == 'assistant' -%}" + _DATE + "{%- endif -%}"
            "{{- '\n' -}}",
            ask="{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}" + _DATE + "{{- '\n' -}}{%- endif -%}",
        ),
        None,
        None,
    ),
    "tools in the last message": Hostile(
        _template(
            tools="",
            head=_HEAD + "{%- if loop.last and tools -%}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
            "{%- endif -%}",
        ),
        "context_changed",
        "context_changed",
    ),
    # Refusals
    "refuses parallel calls": Hostile(
        _template(
            calls="{{- raise_exception('One.') if message.tool_calls and message.tool_calls | length > 1 -}}" + _CALLS
        ),
        None,
        None,
    ),
    "refuses system": Hostile(
        _template(head="{{- raise_exception('None.') if message.role == 'system' -}}" + _HEAD), None, None
    ),
    "alternates": Hostile(
        _template(
            calls="",
            head="{{- raise_exception('Take turns.') if (message.role == 'user') != (loop.index0 % 2 == 0) -}}" + _HEAD,
            tools="",
        ),
        None,
        None,
    ),
    "refuses three messages": Hostile(
        _template(head="{{- raise_exception('Odd.') if messages | length == 3 -}}" + _HEAD), "not_proved", "not_proved"
    ),
    # Ends
    "next turn's opener ends the turn": Hostile(
        _template(end="{{- '<|im_end|>\n' if message.role != 'assistant' -}}"), None, None
    ),
    "no end, no opener": Hostile(
        _template(head="{{- message.role + ': ' -}}", end="{{- '\n' -}}", ask="{{- 'assistant: ' -}}"),
        "not_proved",
        "not_proved",
    ),
    "calls end otherwise": Hostile(
        _template(end="{{- '<|endoftext|>\n' if message.tool_calls else '<|im_end|>\n' -}}"), None, None
    ),
    "two end tokens": Hostile(_template(end="{{- '<|im_end|><|endoftext|>\n' -}}"), None, None),
    "end token on a line of its own": Hostile(_template(end="{{- '\n<|im_end|>\n' -}}"), None, None),
    "merges results": Hostile(
        _template(
            head="{{- '<|im_start|>' + message.role + '\n' "
            "if message.role != 'tool' or loop.previtem.role != 'tool' -}}",
            end="{{- '<|im_end|>\n' if message.role != 'tool' or loop.last or loop.nextitem.role != 'tool' -}}",
        ),
        None,
        None,
    ),
}


def hostile(name: str) -> Tokenizer:
    base = Tokenizer.load(TOKENIZER_FOLDER)
    return Tokenizer(base.backend, base.special_tokens, ChatTemplate(HOSTILE[name].source, base.special_tokens))

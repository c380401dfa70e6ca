"""Chat templates: messages to the text that a model was trained on.

The environment is the one that Hugging Face's chat templates are written for, so that a template renders here to
exactly the text that `apply_chat_template` gives. A template is code of the model's author: it runs in Jinja's sandbox
and can't change what it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from polar.errors import PolarError

ChatMessage = Mapping[str, Any]
"""A message in the form of OpenAI's chat API, as plain data: templates read it by key."""


class ToolSpec(dict[str, Any]):
    """A tool's description. Conversations repeat it with every call, so it is written as JSON only once."""

    @cached_property
    def json(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class TemplateError(PolarError):
    """The template refuses the messages, or breaks on them."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for those who mask by it. Here it only has to be accepted. The
    body becomes a call block, as it does in transformers: what is set inside isn't seen outside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 (templates show the local date, as in transformers)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and keys stay in order."""
    if isinstance(value, ToolSpec) and not ensure_ascii and indent is None and separators is None and not sort_keys:
        return value.json
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(
    ("first", "last", "index", "index0", "revindex", "revindex0", "length", "previtem", "nextitem")
)
_HARMLESS_TYPES = frozenset((str, LoopContext, Namespace))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the same answers sooner where they are known: most of what a rendering costs is looking up
    `message.role` and the like, and a long conversation has thousands of those."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:  # it can only be a key
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _HARMLESS_TYPES:  # nothing of theirs is internal, or changes what is given to a template
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _map_call_arguments(call: Any) -> Any:
    """Decodes a tool call's arguments to a mapping, which templates expect; the API has JSON text. Text that is no JSON
    object stays as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if function is None or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _map_message_arguments(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_map_call_arguments(call) for call in calls]}


class ChatTemplate:
    """A model's template, or its named templates: then `tool_use` is for requests with tools, `default` for the others.

    `variables` are what every rendering sees besides the messages: the special tokens (`eos_token`, ...).
    """

    def __init__(self, source: str | Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._variables = dict(variables or {})
        if "default" not in self._sources:
            raise TemplateError(f"There is no default among the chat templates {sorted(self._sources)}.")
        for template in self._sources.values():
            try:
                _compile(template)
            except jinja2.TemplateError as error:
                raise TemplateError(f"The chat template is no valid Jinja: {error}.") from error

    @property
    def all_sources(self) -> str:
        """The sources of all templates."""
        return "\n".join(self._sources.values())

    def select_source(self, tools: bool = False) -> str:
        return self._sources["tool_use"] if tools and "tool_use" in self._sources else self._sources["default"]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        map_arguments: bool = True,
        **kwargs: Any,
    ) -> str:
        """Renders messages. `map_arguments` passes calls' arguments as mappings, which most templates expect, not as
        JSON text. Raises TemplateError if the template refuses or can't read the messages.
        """
        variables = self._variables | kwargs
        try:
            return _compile(self.select_source(tools is not None)).render(
                messages=[_map_message_arguments(message) for message in messages] if map_arguments else messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise TemplateError(f"The chat template can't render these messages: {error}") from error

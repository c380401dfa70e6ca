"""What a model family is: the markup that its models were trained to write around reasoning and tool calls.

A family reads sampled ids back into what the model said. It is recognised by the tokenizer and its chat template,
never by a model's name. Nothing is repaired: what looks like a call and is none goes on as text, exactly as the model
wrote it, and is flagged.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from polar.rendering.tokenizer import Tokenizer
from polar.types import ReplyEvent, Tool


class ReplyParser(Protocol):
    """Reads one reply. The events, neighbours of a kind joined, don't depend on how the ids were cut into calls of
    `feed`."""

    malformed: bool
    """Something looked like a call and did not parse: it went on as text."""

    def feed(self, ids: Sequence[int]) -> list[ReplyEvent]:
        """What is certain by now. Text and reasoning come as they are sampled; a call comes when it is whole."""
        ...

    def finish(self) -> list[ReplyEvent]:
        """The rest, given that nothing more comes."""
        ...


class Family(Protocol):
    name: ClassVar[str]

    def make_parser(self, *, prompt_end: str, tools: Sequence[Tool] | None) -> ReplyParser:
        """`prompt_end` is the text of the last part of the prompt, the generation prompt included: the parser starts
        in the state that it leaves. `tools` are the request's functions; without any, calls are not looked for."""
        ...

    def make_call_id(self, name: str, number: int) -> str:  # noqa: ARG002
        """The id of a conversation's call of this number, counted from 0, as the model is shown it."""
        return f"call_{number}"


class ParsedCall(NamedTuple):
    name: str
    arguments: str  # JSON text
    id: str | None = None  # as the model wrote it, in markup that has one


class FamilySigns:
    """What a family is recognised by: the template's source, and the markers that are tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = tokenizer.added_tokens
        self.template = tokenizer.template_source

    def has_marker(self, marker: str) -> bool:
        return marker in self.tokens or marker in self.template

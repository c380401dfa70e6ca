"""A model's folder as the gateway uses it: from a request to a prompt's ids, and from sampled ids to what was said.

Request -> Conversation -> Plan (recorded ids + text) -> ids        sampled ids -> Parser -> Events
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar.errors import ConfigError
from polar.parts import Parts
from polar.rendering.continuation import Cut, History, Known, Mode, Plan, Planner, named
from polar.rendering.encoder import PromptEncoder
from polar.rendering.families import Parser, SpelledOut, family_for
from polar.rendering.messages import Conversation, conversation
from polar.rendering.saying import Saying, saying
from polar.rendering.seams import Seams
from polar.rendering.skeleton import Renderer
from polar.rendering.tokenizer import Ids, Tokenizer, load_tokenizer
from polar.rendering.traits import find_traits
from polar.types import (
    Media,
    Message,
    Part,
    Request,
    ToolResult,
)


class Model:
    def __init__(
        self, tokenizer: Tokenizer, mode: Mode = "auto", template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer)
        family = family_for(tokenizer)
        call_id = family.call_id
        self.traits = find_traits(tokenizer.template, call_id)
        # A template without tools has them spelled out (messages.py) in the most common markup.
        self.family = family if self.traits.tools else SpelledOut(tokenizer)
        self._renderer = Renderer(tokenizer.template, self.traits)
        seams = Seams(self._renderer, self.encoder, call_id)
        self._planner = Planner(self._renderer, seams, self.encoder, mode)
        self._call_id = call_id
        self._kwargs = template_kwargs or {}

    @classmethod
    def load(cls, folder: str | Path, mode: Mode = "auto", template_kwargs: dict[str, Any] | None = None) -> "Model":
        return cls(load_tokenizer(resolve_folder(folder)), mode, template_kwargs)

    def plan(self, request: Request, history: History, cut: Cut) -> Plan:
        """How the prompt of a request (of plain function tools) comes about. Raises TemplateError."""
        return self._planner.plan(self._conversation(request, request.messages, history), history, cut)

    def turn(self, request: Request, parts: Sequence[Part], history: History) -> Ids | None:
        """What this model would have sampled to say these parts in answer to a request, its end token included: what
        the template writes behind the prompt for it. None where it does not write a turn as its prompt begins one.
        Raises TemplateError."""
        answered = [*request.messages, Message("assistant", list(parts))]
        prompt = self._renderer.whole(self._conversation(request, request.messages, history))
        whole = self._renderer.whole(self._conversation(request, answered, history), generation_prompt=False)
        if not whole.startswith(prompt):
            return None
        ends = [found.end() for found in self.encoder.controls(whole, len(prompt))]
        end = ends[-1] if ends and not whole[ends[-1] :].strip() else len(whole)
        return self.encoder.encode(whole[len(prompt) : end], first=False)

    def _conversation(self, request: Request, messages: Sequence[Message], history: History) -> Conversation:
        kwargs: dict[str, Any] = {}
        if request.thinking.enabled is not None:
            kwargs["enable_thinking"] = request.thinking.enabled
        if request.thinking.effort:
            kwargs["reasoning_effort"] = self.encoder.guard(request.thinking.effort)
        return conversation(
            messages,
            request.tools,
            kwargs | self._kwargs,
            traits=self.traits,
            guard=self.encoder.guard,
            call_id=self._call_id,
            written=history.written,
            together=_together,
        )

    def parser(self, request: Request, prompt_end: str) -> Parser:
        """Tools that the harness forbids for one call are still shown, so that the context stays the same; what looks
        like a call is text then."""
        tools = request.tools if request.tool_choice.mode != "none" else None
        return self.family.parser(prompt_end=prompt_end, tools=tools)

    def cut(self, known: Known, shown: Saying, sampled: Sequence[int], request: Request) -> int | None:
        """How many of a partly delivered turn's first tokens say this: as many as possible, None where none do."""
        parser = self.parser(request, known.mark.opening)
        parts = Parts()
        says = Saying()
        kept = None
        for count, id in enumerate(sampled[: known.delivered], 1):
            if events := parser.feed([id]):
                for event in events:
                    parts.add(event)
                says = saying(parts.all())
            if says == shown:
                kept = count
        return kept


def renderable(request: Request) -> bool:
    """Whether a gateway can render this, or only the engine: pictures, raw prompts, forced calls and formats."""
    return (
        request.prompt is None
        and not request.tool_choice.forces
        and request.response_format.kind == "text"
        and not any(_has_media(part) for message in request.messages for part in message.parts)
    )


def _has_media(part: Part) -> bool:
    return isinstance(part, Media) or (
        isinstance(part, ToolResult) and any(isinstance(piece, Media) for piece in part.parts)
    )


def _together(first: Message, second: Message) -> bool:
    """Two assistant messages in a row are one turn where both name the same exchange."""
    one = named(first.parts)
    return one is not None and one == named(second.parts)


def resolve_folder(folder: str | Path) -> Path:
    """A folder; or a model's name, where a copy of it is on this machine already. Nothing is downloaded."""
    path = Path(folder)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(folder), local_files_only=True))
    except Exception as error:  # the library has many, and all mean that it isn't there
        raise ConfigError(
            f"[engine] tokenizer: there is no folder {str(folder)!r}, nor a model of that name in the local cache."
        ) from error

"""A model's folder as the gateway uses it: plans prompts of requests, and parses sampled ids.

Request -> Conversation -> PromptPlan (recorded ids + text) -> ids        sampled ids -> ReplyParser -> events
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar.errors import ConfigError
from polar.records.exchange import TokenIds
from polar.rendering.continuation import (
    ContinuationMode,
    MatchDelivered,
    PromptPlan,
    PromptPlanner,
    RecordedTurn,
    TurnHistory,
    find_named_exchange,
)
from polar.rendering.encoder import PromptEncoder
from polar.rendering.families import FallbackFamily, ReplyParser, detect_family
from polar.rendering.messages import Conversation, build_conversation, find_traits
from polar.rendering.seams import SeamProver
from polar.rendering.skeleton import Renderer
from polar.rendering.tokenizer import Tokenizer, load_tokenizer
from polar.rendering.turn_digest import TurnDigest, digest_turn
from polar.reply_parts import PartsBuilder
from polar.types import (
    Media,
    Message,
    Part,
    Request,
    ToolResult,
)


class ModelCodec:
    def __init__(
        self, tokenizer: Tokenizer, mode: ContinuationMode = "auto", template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer)
        family = detect_family(tokenizer)
        call_id = family.make_call_id
        self.traits = find_traits(tokenizer.template, call_id)
        # A template without tools has them spelled out (messages.py) in the most common markup.
        self.family = family if self.traits.supports_tools else FallbackFamily(tokenizer)
        self._renderer = Renderer(tokenizer.template, self.traits)
        seams = SeamProver(self._renderer, self.encoder, call_id)
        self._planner = PromptPlanner(self._renderer, seams, self.encoder, mode)
        self._make_call_id = call_id
        self._kwargs = template_kwargs or {}

    @classmethod
    def load(
        cls, folder: str | Path, mode: ContinuationMode = "auto", template_kwargs: dict[str, Any] | None = None
    ) -> "ModelCodec":
        return cls(load_tokenizer(resolve_model_folder(folder)), mode, template_kwargs)

    def plan_prompt(self, request: Request, history: TurnHistory, match_delivered: MatchDelivered) -> PromptPlan:
        """Plans the prompt of a request, whose tools are plain functions. Raises TemplateError."""
        return self._planner.plan_prompt(
            self._build_conversation(request, request.messages, history), history, match_delivered
        )

    def encode_turn(self, request: Request, parts: Sequence[Part], history: TurnHistory) -> TokenIds | None:
        """Encodes a reply of these parts as the model would have sampled it, with its end token: the template's text
        behind the prompt. Returns None if the template does not continue its prompt with the turn. Raises
        TemplateError."""
        answered = [*request.messages, Message("assistant", list(parts))]
        prompt = self._renderer.render(self._build_conversation(request, request.messages, history))
        text = self._renderer.render(self._build_conversation(request, answered, history), generation_prompt=False)
        if not text.startswith(prompt):
            return None
        ends = [match.end() for match in self.encoder.find_controls(text, len(prompt))]
        end = ends[-1] if ends and not text[ends[-1] :].strip() else len(text)
        return self.encoder.encode(text[len(prompt) : end], first=False)

    def _build_conversation(self, request: Request, messages: Sequence[Message], history: TurnHistory) -> Conversation:
        kwargs: dict[str, Any] = {}
        if request.thinking.enabled is not None:
            kwargs["enable_thinking"] = request.thinking.enabled
        if request.thinking.effort:
            kwargs["reasoning_effort"] = self.encoder.guard(request.thinking.effort)
        return build_conversation(
            messages,
            request.tools,
            kwargs | self._kwargs,
            traits=self.traits,
            guard=self.encoder.guard,
            make_call_id=self._make_call_id,
            find_written_id=history.find_written_id,
            belong_together=_name_same_exchange,
        )

    def make_parser(self, request: Request, prompt_end: str) -> ReplyParser:
        """Makes the parser of the request's reply. If the harness forbids tools for this call, the prompt still shows
        them, so that the context stays the same, but calls are parsed as text."""
        tools = request.tools if request.tool_choice.mode != "none" else None
        return self.family.make_parser(prompt_end=prompt_end, tools=tools)

    def count_matching_tokens(
        self, turn: RecordedTurn, shown: TurnDigest, sampled: Sequence[int], request: Request
    ) -> int | None:
        """Counts the first tokens of a partly delivered turn that say what `shown` does: as many as possible. Returns
        None if no number of them does."""
        parser = self.make_parser(request, turn.mark.opening)
        parts = PartsBuilder()
        digest = TurnDigest()
        matching = None
        for count, id in enumerate(sampled[: turn.delivered_tokens], 1):
            if events := parser.feed([id]):
                for event in events:
                    parts.add(event)
                digest = digest_turn(parts.build())
            if digest == shown:
                matching = count
        return matching


def is_renderable(request: Request) -> bool:
    """Whether the gateway can render this. Only the engine can render pictures, raw prompts, forced calls and
    formats."""
    return (
        request.prompt is None
        and not request.tool_choice.forces_call
        and request.response_format.kind == "text"
        and not any(_has_media(part) for message in request.messages for part in message.parts)
    )


def _has_media(part: Part) -> bool:
    return isinstance(part, Media) or (
        isinstance(part, ToolResult) and any(isinstance(piece, Media) for piece in part.parts)
    )


def _name_same_exchange(first: Message, second: Message) -> bool:
    """Whether two assistant messages in a row are one turn: both name the same exchange."""
    exchange_id = find_named_exchange(first.parts)
    return exchange_id is not None and exchange_id == find_named_exchange(second.parts)


def resolve_model_folder(folder: str | Path) -> Path:
    """Returns the folder, or that of a model's copy in the local cache if `folder` is a model's name. Downloads
    nothing."""
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

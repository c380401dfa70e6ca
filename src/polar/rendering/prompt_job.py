"""A prompt to render: everything needed for it as plain data, so that another process can render it as well.

request, history -> plan (continuation.py) -> text -> ids -> RenderedPrompt
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from polar.errors import PolarError
from polar.records.exchange import ContextMark, TokenIds
from polar.rendering.continuation import BranchReason, RecordedTurn, TurnHistory
from polar.rendering.encoder import SPELLING_BREAK, count_utf8_bytes
from polar.rendering.model_codec import ModelCodec
from polar.rendering.turn_digest import TurnDigest
from polar.types import Request

_JSON_PIECE_IDS = 16 * 1024
"""Ids that are written as JSON in one call of C code, during which no other thread runs."""

_MIN_SCAN_BYTES = 256 * 1024
"""A text of this size that is unlikely to fit is counted piece by piece before it is encoded."""

_LIKELY_BYTES_PER_TOKEN = 6
"""Text rarely has more bytes per token."""


class ContextExceeded(PolarError):
    """The prompt has more tokens than the model's context."""

    def __init__(self, length: int) -> None:
        super().__init__(f"This model's maximum context length is {length} tokens, and the prompt has more.")


class PromptJob(Struct):
    request: Request  # of plain function tools
    turns: list[RecordedTurn]
    unmarked: list[str]
    written_ids: dict[str, str]
    partial_turns: dict[str, list[int]]
    """The sampled ids of turns that were delivered in part, by exchange."""
    context_length: int | None

    @classmethod
    def from_request(
        cls, request: Request, history: TurnHistory, partial_turns: dict[str, list[int]], context_length: int | None
    ) -> "PromptJob":
        return cls(
            request,
            list(history.turns.values()),
            list(history.unmarked),
            history.written_ids,
            partial_turns,
            context_length,
        )

    def build_history(self) -> TurnHistory:
        history = TurnHistory(unmarked=set(self.unmarked), written_ids=self.written_ids)
        for turn in self.turns:
            history.add(turn)
        return history


class PromptPrefix(NamedTuple):
    """The recorded ids that a prompt begins with (continuation.RecordedPrefix), by the exchange's id."""

    exchange_id: str
    sampled_tokens: int | None
    dropped_tokens: int


class RenderedPrompt(NamedTuple):
    base: PromptPrefix | None
    ids: TokenIds  # of the text behind the base
    ids_json: bytes  # the same as a JSON list without its brackets
    prompt_end: str  # of the whole prompt's text
    mark: ContextMark | None
    reason: BranchReason | None


def make_prompt(
    model: ModelCodec,
    request: Request,
    history: TurnHistory,
    partial_turns: dict[str, list[int]],
    context_length: int | None,
) -> RenderedPrompt:
    """Renders a request's prompt. Raises TemplateError, ContextExceeded, or RecursionError if the request is nested too
    deeply."""

    def match_delivered(turn: RecordedTurn, shown: TurnDigest) -> int | None:
        sampled = partial_turns.get(turn.exchange_id)
        return None if sampled is None else model.count_matching_tokens(turn, shown, sampled, request)

    plan = model.plan_prompt(request, history, match_delivered)
    base = None if plan.base is None else PromptPrefix(plan.base.turn.exchange_id, *plan.base[1:])
    if context_length is not None:
        remaining_tokens = context_length - (0 if plan.base is None else plan.base.length)
        if not _may_fit(model, plan.text, remaining_tokens):
            raise ContextExceeded(context_length)
    ids = model.encoder.encode(plan.text, first=plan.base is None)
    return RenderedPrompt(base, ids, encode_ids_json(ids), plan.prompt_end, plan.mark, plan.reason)


def _may_fit(model: ModelCodec, text: str, tokens: int) -> bool:
    """Returns False if the text certainly has more tokens. Does not encode all of it for that."""
    size = count_utf8_bytes(text)
    if size <= _MIN_SCAN_BYTES and size <= tokens:
        return True
    if not model.encoder.text_bound.can_fit([text.replace(SPELLING_BREAK, "")], max(tokens, 0)):
        return False
    return size <= max(_MIN_SCAN_BYTES, _LIKELY_BYTES_PER_TOKEN * tokens) or not model.encoder.exceeds_tokens(
        text, max(tokens, 0)
    )


def encode_ids_json(ids: TokenIds) -> bytes:
    """Encodes ids as a JSON list without its brackets."""
    pieces: Sequence[TokenIds] = np.split(ids, range(_JSON_PIECE_IDS, len(ids), _JSON_PIECE_IDS)) if len(ids) else []
    return b",".join(msgspec.json.encode(piece.tolist())[1:-1] for piece in pieces)

"""One prompt to make: all that it takes, as plain data, so that another process can make it just as well.

request, history -> plan (continuation.py) -> text -> ids -> Prompt
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from polar.errors import PolarError
from polar.rendering.continuation import BranchReason, History, Known
from polar.rendering.encoder import BREAK, utf8_size
from polar.rendering.mark import ContextMark
from polar.rendering.model import Model
from polar.rendering.saying import Saying
from polar.rendering.tokenizer import Ids
from polar.types import Request

_IDS_AT_ONCE = 16 * 1024
"""Ids that are written as JSON in one call of C code, during which no other thread runs."""

_SCANNED = 256 * 1024
"""Bytes from which on a text that is unlikely to fit is tried piece by piece before it is encoded whole."""

_LIKELY_BYTES = 6
"""Bytes a token that text rarely has more of."""


class ContextExceeded(PolarError):
    """The prompt has more tokens than the model's context."""

    def __init__(self, length: int) -> None:
        super().__init__(f"This model's maximum context length is {length} tokens, and the prompt has more.")


class PromptJob(Struct):
    request: Request  # of plain function tools
    known: list[Known]
    unmarked: list[str]
    written: dict[str, str]
    cuts: dict[str, list[int]]
    """The sampled ids of turns that were delivered in part, by exchange."""
    context_length: int | None

    @classmethod
    def from_request(
        cls, request: Request, history: History, cuts: dict[str, list[int]], context_length: int | None
    ) -> "PromptJob":
        return cls(
            request, list(history.known.values()), list(history.unmarked), history.written_ids, cuts, context_length
        )

    def history(self) -> History:
        history = History(unmarked=set(self.unmarked), written_ids=self.written)
        for known in self.known:
            history.add(known)
        return history


class PromptBase(NamedTuple):
    """The recorded ids that a prompt begins with (continuation.Base), by the exchange's id."""

    exchange_id: str
    sampled: int | None
    drop: int


class Prompt(NamedTuple):
    base: PromptBase | None
    ids: Ids  # of the text behind the base
    json: bytes  # the same as a JSON list without its brackets
    end: str  # of the whole prompt's text
    mark: ContextMark | None
    reason: BranchReason | None


def make_prompt(
    model: Model, request: Request, history: History, cuts: dict[str, list[int]], context_length: int | None
) -> Prompt:
    """Raises TemplateError, ContextExceeded, or RecursionError where a request is nested too deeply."""

    def cut(known: Known, shown: Saying) -> int | None:
        sampled = cuts.get(known.exchange_id)
        return None if sampled is None else model.cut(known, shown, sampled, request)

    plan = model.plan(request, history, cut)
    base = None if plan.base is None else PromptBase(plan.base.known.exchange_id, *plan.base[1:])
    if context_length is not None:
        left = context_length - (0 if plan.base is None else plan.base.length)
        if not _may_fit(model, plan.text, left):
            raise ContextExceeded(context_length)
    ids = model.encoder.encode(plan.text, first=plan.base is None)
    return Prompt(base, ids, ids_as_json(ids), plan.end, plan.mark, plan.reason)


def _may_fit(model: Model, text: str, tokens: int) -> bool:
    """False where the text certainly has more tokens, which is found out without encoding all of it."""
    size = utf8_size(text)
    if size <= _SCANNED and size <= tokens:
        return True
    if not model.encoder.text_bound.can_fit([text.replace(BREAK, "")], max(tokens, 0)):
        return False
    return size <= max(_SCANNED, _LIKELY_BYTES * tokens) or not model.encoder.exceeds(text, max(tokens, 0))


def ids_as_json(ids: Ids) -> bytes:
    """As a JSON list without its brackets."""
    pieces: Sequence[Ids] = np.split(ids, range(_IDS_AT_ONCE, len(ids), _IDS_AT_ONCE)) if len(ids) else []
    return b",".join(msgspec.json.encode(piece.tolist())[1:-1] for piece in pieces)

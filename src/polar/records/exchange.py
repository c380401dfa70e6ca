"""A captured model call: what the harness asked, as it wrote it, what was sampled, and how it got there."""

from typing import Literal

import numpy as np
from msgspec import Raw, Struct, field
from numpy.typing import NDArray

from polar.types import FinishReason, Reply, SamplingParams, Usage

TokenIds = NDArray[np.int32]

Logprobs = NDArray[np.float32]

LogprobKind = Literal["raw", "processed", "none"]

SENTINEL_LOGPROB = -1000.0
"""No sampled token is this unlikely; engines write such numbers (-9999, say) where they have none."""

ExchangeStatus = Literal["complete", "partial", "failed", "interrupted"]
"""interrupted: the gateway's process ended before the call did, and only its start is known."""

Continuation = Literal["recorded", "rendered", "engine"]


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Sampled tokens `start` to `stop` (exclusive) came from policy `version`."""

    version: int
    start: int
    stop: int


class RawRequest(Struct):
    """A request's body, split but not yet understood: every top-level field as raw JSON, and the one list that grows
    from turn to turn (messages, input, contents) as raw items. The store keeps these by difference; the dialect
    decodes them."""

    fields: dict[str, Raw]  # without the list
    list_name: str
    items: list[Raw]


class ContextMark(Struct, frozen=True, array_like=True, gc=False):
    """What a later request needs to prove that it goes on from a prompt (continuation.py)."""

    context: str  # digest of the prompt's text (not the model's turns, nor the generation prompt) and the tokenizer
    length: int  # of that text, in characters
    turns: str  # digest of what the model's turns in it say
    opening: str  # the generation prompt


class Exchange(Struct):
    """One captured model call: what the harness asked (as it wrote it), what was sampled, and how it got there."""

    exchange_id: str
    session_id: str
    seq: int  # order of arrival within the session
    dialect: str
    params: dict[str, str]  # of the route: a model named in the path, say
    hints: dict[str, str]  # request headers that say something of the harness (never credentials)
    raw_request: RawRequest
    status: ExchangeStatus
    started_at: float
    ended_at: float
    first_token_at: float | None = None
    reply: Reply | None = None  # None where nothing was sampled
    error: str | None = None
    prompt_ids: TokenIds | None = None
    sampled_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    logprob_kind: LogprobKind = "none"
    delivered: int = 0  # sampled tokens whose text was written to the harness
    sampling: SamplingParams = field(default_factory=SamplingParams)  # as used
    versions: list[VersionSpan] = field(default_factory=list)  # empty where unknown
    replica: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    continuation: Continuation = "engine"
    branch_reason: str | None = None
    untrainable: str | None = None
    routed_experts: bytes | None = None
    parent: str | None = (
        None  # the exchange whose turn this one goes on from; found by the store where the gateway is silent
    )
    context_mark: ContextMark | None = None  # of a prompt that the gateway rendered
    malformed: bool = False  # something looked like a tool call and did not parse: it went on as text
    checksum: bytes | None = None  # of the tokens and numbers, as the store took them in

    def build_request_body(self) -> dict[str, Raw | list[Raw]]:
        """The harness's request body, field by field."""
        body: dict[str, Raw | list[Raw]] = dict(self.raw_request.fields)
        if self.raw_request.items or self.raw_request.list_name not in body:
            body[self.raw_request.list_name] = self.raw_request.items
        return body


class StartedCall(Struct, frozen=True):
    """A call that is under way: what is known of it should its process be killed."""

    exchange_id: str
    session_id: str
    seq: int
    dialect: str
    list_name: str  # of the field that grows from turn to turn (Wire)
    model: str
    started_at: float
    request_bytes: int

"""A model call before anything is sampled: what the harness asked for, and the prompt that was made of it.

HTTP request --(dialect)--> HarnessCall --(prompt_renderer)--> PreparedPrompt
"""

from msgspec import Struct

from polar.dialects.base import Dialect
from polar.engines.base import TokenPrompt
from polar.records.exchange import ContextMark, Continuation, RawRequest
from polar.types import Request


class HarnessCall(Struct, frozen=True):
    """A decoded request, which stays the same while it is answered."""

    dialect: Dialect
    params: dict[str, str]
    hints: dict[str, str]
    body: bytes
    raw_request: RawRequest
    request: Request

    def is_retry_of(self, other: "HarnessCall") -> bool:
        """Whether this repeats the other request, as clients do after a broken connection."""
        return self.body == other.body and self.params == other.params and self.dialect is other.dialect


class PreparedPrompt(Struct):
    """A prompt whose token ids the gateway made, and how it was made."""

    prompt: TokenPrompt
    request: Request  # with plain function tools
    text_tail: str  # of the prompt's text
    continuation: Continuation
    parent: str | None
    branch_reason: str | None
    context_mark: ContextMark | None

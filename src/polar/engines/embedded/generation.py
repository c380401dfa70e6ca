"""One reply that is being sampled, as the event loop sees it."""

import asyncio
from collections.abc import AsyncGenerator

from polar.engines.api_server.backend import (
    FinishReason,
    GenerationRequest,
    OutputTracker,
    SampledToken,
    extend_spans,
)
from polar.errors import EngineError
from polar.records.exchange import VersionSpan
from polar.rendering.tokenizer import Tokenizer


class Generation:
    """Tokens come in through `add_token`, and go out through `steps`. Used on the event loop alone, once it is made."""

    cached_tokens = 0  # not reported
    output_parser = None  # replies are text: the gateway reads ids, and what they say
    routed_experts = None

    def __init__(self, request: GenerationRequest, end_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        """`end_ids`: the tokens with which the model itself ends its turn."""
        self.request = request
        self.tokens: list[SampledToken] = []
        self.spans: list[VersionSpan] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._tracker = OutputTracker(request, end_ids, tokenizer)
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def stop_reason(self) -> int | str | None:
        return self._tracker.stop_reason

    @property
    def reports_logprobs(self) -> bool:
        return self.request.wants_logprobs

    @property
    def context(self) -> list[int]:
        """All that the next token is conditioned on."""
        prompt: list[int] = self.request.prompt.tolist()
        return prompt + [token.id for token in self.tokens]

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens it may have."""
        return self._tracker.remaining_tokens

    def add_token(self, token: SampledToken) -> None:
        """Says by `done` whether that was the last one; what comes after that is not part of it."""
        if self.done:
            return
        token.text = self._tracker.add(token.id)
        self.tokens.append(token)
        extend_spans(self.spans, token.version, len(self.tokens) - 1, len(self.tokens))
        self.finish_reason = self._tracker.finish_reason
        self._changed.set()

    def fail(self, error: str) -> None:
        if not self.done:
            self.error = error
            self._changed.set()

    def abort(self) -> None:
        if not self.done:
            self.finish_reason = "abort"
            self._changed.set()

    async def sample_steps(self) -> AsyncGenerator[list[SampledToken]]:
        """What was sampled since the last step, as soon as there is something. Only the last one may be empty.
        Raises EngineError where the model broke."""
        seen = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.error is not None:
                raise EngineError(self.error)
            new, seen, done = self.tokens[seen:], len(self.tokens), self.done
            yield new
            if done:
                return

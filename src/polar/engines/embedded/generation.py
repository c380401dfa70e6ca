"""One reply that is being sampled, as the event loop sees it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from msgspec import Struct, field

from polar.errors import EngineError
from polar.records.exchange import VersionSpan
from polar.rendering.tokenizer import Tokenizer

Finish = Literal["stop", "length", "abort"]


class SamplingOptions(Struct, frozen=True):
    """How a request wants its tokens drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    alternatives: int = 0  # how many of the likeliest tokens are reported beside each

    @property
    def truncates_distribution(self) -> bool:
        """Whether some tokens can't be drawn at all."""
        return bool(self.temperature) and bool(self.top_k or self.top_p < 1 or self.min_p > 0)


class SampledToken(Struct):
    id: int
    logprob: float
    version: int
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    text: str = ""  # what it adds to the output, where somebody asks for text


class GenerationRequest(Struct):
    """A request, understood."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # besides the model's own ends
    show_stop: bool = False
    wants_text: bool = False  # whether the reply has text, beside the ids


class Generation:
    """Tokens come in through `take`, and go out through `steps`. Used on the event loop alone."""

    def __init__(self, request: GenerationRequest, end_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        """`ends`: the tokens with which the model itself ends its turn."""
        self.request = request
        self.tokens: list[SampledToken] = []
        self.spans: list[VersionSpan] = []  # which weights sampled which tokens
        self.finish_reason: Finish | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._end_ids = end_ids
        self._detokenizer = tokenizer.make_detokenizer() if request.wants_text or request.stop else None
        self._text_so_far = ""
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def context(self) -> list[int]:
        """All that the next token is conditioned on."""
        return self.request.prompt + [token.id for token in self.tokens]

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens it may have."""
        return self.request.max_tokens - len(self.tokens)

    def add_token(self, token: SampledToken) -> None:
        """Says by `done` whether that was the last one; what comes after that is not part of it."""
        if self.done:
            return
        self.tokens.append(token)
        self._label(token.version)
        if token.id in self._end_ids or token.id in self.request.stop_token_ids:
            # The token is reported, its text is not.
            self.finish_reason, self.stop_reason = "stop", None if token.id in self._end_ids else token.id
            token.text = self._detokenizer.flush() if self._detokenizer is not None else ""
        else:
            if self._detokenizer is not None:
                token.text = self._detokenizer.add(token.id)
                self._stop_at_text(token)
            if self.finish_reason is None and self.remaining_tokens <= 0:
                self.finish_reason = "length"
                token.text += self._detokenizer.flush() if self._detokenizer is not None else ""
        self._changed.set()

    def _label(self, version: int) -> None:
        """The newest token."""
        count = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, count)
        else:
            self.spans.append(VersionSpan(version, count - 1, count))

    def _stop_at_text(self, token: SampledToken) -> None:
        """The token that completes a stop string is the last one; the string itself isn't shown."""
        before, self._text_so_far = len(self._text_so_far), self._text_so_far + token.text
        found = [(at + len(stop), at, stop) for stop in self.request.stop if (at := self._text_so_far.find(stop)) >= 0]
        if found:
            whole, at, stop = min(found)
            token.text = self._text_so_far[before : max(before, whole if self.request.show_stop else at)]
            self.finish_reason, self.stop_reason = "stop", stop

    def fail(self, error: str) -> None:
        if not self.done:
            self.error = error
            self._changed.set()

    def abort(self) -> None:
        if not self.done:
            self.finish_reason = "abort"
            self._changed.set()

    async def steps(self) -> AsyncGenerator[list[SampledToken]]:
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

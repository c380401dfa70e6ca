"""What an engine is to the server: it takes requests that are understood already, and samples their tokens.

    GenerationRequest ─ make_generation ─► Generation ─ start_generation ─► steps of SampledTokens ─ end_generation

Two engines implement it: `scripted` (written turns through a real tokenizer) and `embedded` (a model on transformers).
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from polar.engines.api_server import wire
from polar.engines.api_server.output_parser import OutputParser
from polar.records.exchange import TokenIds, VersionSpan
from polar.rendering.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort"]


class RequestError(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        name = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.status = status
        self.body = msgspec.json.encode(wire.ErrorReply(wire.ErrorInfo(message, name, param, status.value)))


class BrokenReplyError(Exception):
    """The reply is to break here, as a test of clients wants it: with these bytes, or with its connection (None)."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(data)
        self.data = data


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


class GenerationRequest(Struct):
    """A request of any generating route, with its prompt as token ids."""

    prompt: TokenIds
    max_tokens: int
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # besides the model's own ends
    show_stop: bool = False
    wants_text: bool = False  # whether the reply has text, beside the ids
    wants_logprobs: bool = False
    stream: bool = False  # whether tokens are wanted as they are sampled
    chat: wire.ChatRequest | None = None  # what the prompt was rendered from, where it was messages


class SampledToken(Struct):
    id: int
    logprob: float | None  # None: not reported
    version: int
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    text: str = ""  # what it adds to the output, where somebody asks for text


class Generation(Protocol):
    """One reply that is being sampled."""

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def tokens(self) -> Sequence[SampledToken]:
        """All that were sampled so far."""
        ...

    @property
    def spans(self) -> Sequence[VersionSpan]:
        """Which weights sampled which of them."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it goes on."""
        ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or string that ended it, where it was not the model's own end token."""
        ...

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were computed before."""
        ...

    @property
    def reports_logprobs(self) -> bool: ...

    @property
    def output_parser(self) -> OutputParser | None:
        """Reads reasoning and tool calls out of a chat's text. Without one, the reply is plain text."""
        ...

    @property
    def routed_experts(self) -> str | None:
        """Of all tokens but the last, in vLLM's form, where the engine is a mixture of experts."""
        ...

    def sample_steps(self) -> AsyncGenerator[Sequence[SampledToken]]:
        """What was sampled since the last step. `finish_reason` is set with the last one, which alone may be empty.
        Closing the generator early ends the sampling. Raises EngineError where the engine broke."""
        ...


GenerationT = TypeVar("GenerationT", bound=Generation)


class SamplingBackend(Protocol[GenerationT]):
    """An engine behind the server. All but `make_generation` runs on the event loop."""

    name: str  # as errors call it: "The NAME engine ..."
    tokenizer: Tokenizer
    vocabulary_size: int
    context_length: int
    ignores_media: bool  # takes pictures and the like without looking at them; others refuse them
    labels_every_chunk: bool
    """Whether every chunk of every route says which weights sampled all that came so far. Else, as in vLLM, only the
    last one of the token-in, token-out route does."""
    pause_modes: Sequence[str]

    @property
    def paused(self) -> bool: ...

    @property
    def failed(self) -> bool:
        """Whether nothing can be sampled any more."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of its own, for GET /metrics."""
        ...

    def check(self, asked: wire.SamplingFields) -> None:
        """Raises RequestError for what this engine can't honour."""
        ...

    def make_generation(self, request: GenerationRequest) -> GenerationT:
        """Called in a thread: it may take its time, and must not touch the event loop."""
        ...

    def start_generation(self, generation: GenerationT) -> None: ...

    def end_generation(self, generation: GenerationT) -> None:
        """Nobody waits for more of it."""
        ...

    async def pause(self, mode: str) -> None:
        """New generations wait. Running ones stand still (`keep`), end now (`abort`), or are waited for (`wait`)."""
        ...

    async def resume(self) -> None: ...


class OutputTracker:
    """Follows a reply token by token: what each token adds to the text, and where the reply ends."""

    def __init__(self, request: GenerationRequest, end_ids: Collection[int], tokenizer: Tokenizer) -> None:
        """`end_ids`: the tokens with which the model itself ends its turn."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.shown_length: int | None = None  # of the text, where a stop string ended it
        self.remaining_tokens = request.max_tokens
        self._stop = request.stop
        self._stop_token_ids = request.stop_token_ids
        self._show_stop = request.show_stop
        self._end_ids = end_ids
        self._detokenizer = tokenizer.make_detokenizer() if request.wants_text or request.stop else None
        self._text = ""

    def add(self, id: int) -> str:
        """The text that this token adds; afterwards `finish_reason` says whether it was the last one."""
        self.remaining_tokens -= 1
        if id in self._end_ids or id in self._stop_token_ids:
            # The token is reported, its text is not.
            self.finish_reason, self.stop_reason = "stop", None if id in self._end_ids else id
            return self.flush()
        text = self._detokenizer.add(id) if self._detokenizer is not None else ""
        if self._stop:
            text = self._stop_at_text(text)
        if self.finish_reason is None and self.remaining_tokens <= 0:
            self.finish_reason = "length"
            text += self.flush()
        return text

    def flush(self) -> str:
        """What is still held back of a character that is not whole."""
        return self._detokenizer.flush() if self._detokenizer is not None else ""

    def _stop_at_text(self, text: str) -> str:
        """The token that completes a stop string is the last one; the string itself isn't shown."""
        before, self._text = len(self._text), self._text + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := self._text.find(stop, max(before - len(stop), 0))) >= 0
        ]
        if not found:
            return text
        complete, at, stop = min(found)
        self.finish_reason, self.stop_reason = "stop", stop
        self.shown_length = complete if self._show_stop else at
        return self._text[before : max(before, self.shown_length)]


def extend_spans(spans: list[VersionSpan], version: int, start: int, stop: int) -> None:
    """Tokens `start` to `stop` (exclusive), which come next, were sampled by weights of this version."""
    if spans and spans[-1].version == version:
        spans[-1] = VersionSpan(version, spans[-1].start, stop)
    elif stop > start:
        spans.append(VersionSpan(version, start, stop))

"""What one model call turned out to be: collected chunk by chunk, and in the end an Exchange for the store."""

import asyncio
import logging
import time
from array import array

import numpy as np
from msgspec import Struct

from polar import ids
from polar.dialects.base import Dialect, Wire
from polar.engines.base import Chunk, Ids, TokenPrompt, VersionSpan
from polar.engines.replica import Replica
from polar.errors import ApiError
from polar.gateway.checks import untrainable
from polar.gateway.meter import Clock
from polar.gateway.prompt_ids import PromptIds
from polar.gateway.sessions import OpenSession
from polar.parts import Parts
from polar.rendering.mark import ContextMark
from polar.store.base import Continuation, Exchange, ExchangeStatus, StartedCall
from polar.types import (
    CallStart,
    FinishReason,
    ReasoningDelta,
    Reply,
    Request,
    TokenLogprob,
    Usage,
)

log = logging.getLogger(__name__)

_LONG = 5.0  # seconds after which an engine should have begun
_PATIENCE = 1.0  # seconds that a call may wait for the engine as part of its session's time


class Call(Struct, frozen=True):
    """What a harness asked for, understood: all that does not change while it is answered."""

    session: OpenSession
    dialect: Dialect
    params: dict[str, str]
    hints: dict[str, str]
    body: bytes
    wire: Wire
    request: Request

    def repeats(self, other: "Call") -> bool:
        """The same request once more, as a client sends it after a broken connection."""
        return self.body == other.body and self.params == other.params and self.dialect is other.dialect


class Rendered(Struct):
    """A prompt of our own, and how it came about."""

    prompt: TokenPrompt
    request: Request  # with plain function tools
    end: str  # of the prompt's text
    continuation: Continuation
    parent: str | None
    branch_reason: str | None
    mark: ContextMark | None


class Capture:
    def __init__(self, call: Call, seq: int) -> None:
        self.call = call
        self.seq = seq
        self.exchange_id = ids.new_exchange_id()
        self.created = int(time.time())
        self.sampled: list[int] = []
        self._started_at = time.time()
        self._first_token_at: float | None = None
        self._logprobs: list[float | None] | None = None
        self._aligned = True  # every chunk's log-probabilities are those of its own tokens
        self._alternatives: list[TokenLogprob] = []
        self._prompt_ids: Ids | None = None
        self._prompt_json: bytes | None = None  # until the end, when there is time to read it
        self._parts = Parts()
        self._calls = 0
        self._usage = Usage()
        self._rendered: Rendered | None = None
        self._routed_experts: bytes | None = None
        self.malformed = False
        self._patience: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._stop_sequence: str | None = None
        self._replica: Replica | None = None
        self._versions = _Versions()

    @property
    def started_call(self) -> StartedCall:
        call = self.call
        return StartedCall(
            exchange_id=self.exchange_id,
            session_id=call.session.session_id,
            seq=self.seq,
            dialect=call.dialect.name,
            list_name=call.wire.list_name,
            model=call.request.model,
            started_at=self._started_at,
            request_bytes=len(call.body),
        )

    def rendered(self, rendered: Rendered) -> None:
        """The prompt is ours: its ids are known before anything is sampled."""
        self._rendered = rendered
        self._prompt_ids = rendered.prompt.ids
        self._usage.prompt = len(rendered.prompt.ids)

    def chosen(self, replica: Replica) -> None:
        """The call goes to this replica (and to another, if it gets no answer there)."""
        self._replica = self.call.session.replica = replica
        self._versions = _Versions(replica.version, believed=replica.engine.capabilities.knows_weights)
        if replica.weights_lost:
            self._versions.change(replica.version, 0, known=False)
        if not self.call.request.stream:
            self.begun()  # its first chunk will be its last

    # What the session's clock is told.

    def waits(self, *, paused: bool) -> None:
        """For the engine to begin."""
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(0 if paused else _PATIENCE, self._clock.hold, self)

    def begun(self) -> None:
        self._has_begun = True
        self._lose_patience()
        if self._replica is None or not self._replica.frozen:
            self._clock.busy(self)

    def froze(self) -> None:
        self._clock.hold(self)

    def thawed(self) -> None:
        if self._has_begun:
            self._clock.busy(self)  # another goes on waiting

    def over(self, error: ApiError | None, *, given_up: bool) -> None:
        """`error` is what it failed with. Who gives a call up that has not begun for long has waited for the engine;
        who gives up another has reasons of its own."""
        self._lose_patience()
        self._clock.done(self)
        meter = self.call.session.meter
        meter.sampled(max(0, self._usage.completion - len(self.sampled)))  # of an engine that tells no ids
        late = time.time() - self._started_at > _LONG and not self._has_begun
        if error is not None and (late or not given_up):
            meter.failed(self.exchange_id, error)

    @property
    def _clock(self) -> Clock:
        return self.call.session.meter.clock

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def version_changed(self, version: int, *, frozen: bool) -> None:
        """The weights changed under this call. Where it stood still meanwhile, the boundary is here; else nobody knows.
        Nor where nothing has come yet: an engine that replies whole may have sampled much."""
        self._versions.change(version, len(self.sampled), known=frozen and bool(self.sampled))

    def take(self, chunk: Chunk) -> None:
        if chunk.ids:
            if self._first_token_at is None:
                self._first_token_at = time.time()
            self.sampled += chunk.ids
            self.call.session.meter.sampled(len(chunk.ids))
        if chunk.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += chunk.logprobs
            self._aligned = self._aligned and len(chunk.logprobs) == len(chunk.ids)
        if chunk.alternatives is not None:
            self._alternatives += chunk.alternatives
        for event in chunk.events:
            if isinstance(event, CallStart):
                event.id = ids.call_id(self.exchange_id, self._calls)
                self._calls += 1
            elif isinstance(event, ReasoningDelta) and chunk.reasoning is None:
                self._reasoning_tokens += len(chunk.ids)
            self._parts.add(event)
        self._reasoning_tokens += chunk.reasoning or 0
        if chunk.prompt_ids is not None:
            self._prompt_ids = chunk.prompt_ids
        if chunk.prompt_json is not None:
            self._prompt_json = chunk.prompt_json
        if chunk.usage is not None:
            self._usage = chunk.usage
            if self._rendered is not None:
                self._usage.prompt = len(self._rendered.prompt.ids)
        if chunk.routed_experts is not None:
            self._routed_experts = chunk.routed_experts
        if chunk.versions is not None:
            self._versions.reported = chunk.versions
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            self._stop_sequence = chunk.stop_sequence

    @property
    def prompt_usage(self) -> Usage | None:
        """Prompt counts, as far as they are known while the reply is being sampled."""
        return self._usage if self._usage.prompt else None

    def reply(self) -> Reply:
        """The turn as it stands."""
        usage = self._usage
        if not usage.prompt and self._prompt_ids is not None:
            usage.prompt = len(self._prompt_ids)
        usage.completion = usage.completion or len(self.sampled)
        usage.reasoning = usage.reasoning or min(self._reasoning_tokens, usage.completion)
        finish = self._finish_reason or "stop"
        if finish == "stop" and self._calls:
            finish = "tool_calls"
        return Reply(
            self.exchange_id,
            self.call.request.model,
            self.created,
            self._parts.all(),
            finish,
            self._stop_sequence,
            usage,
            self._alternatives or None,
        )

    def read_prompt(self, prompts: PromptIds) -> None:
        """Reads the prompt's ids, where the engine gave them as JSON; what is no list of ids counts as none."""
        if self._prompt_json is not None and self._prompt_ids is None:
            try:
                self._prompt_ids = prompts.parse(self.call.session.session_id, self._prompt_json)
            except (ValueError, OverflowError, RecursionError) as error:
                log.warning("exchange %s: the engine's prompt ids can't be read: %s", self.exchange_id, error)

    def exchange(self, status: ExchangeStatus, delivered: int, error: str | None, *, wants_logprobs: bool) -> Exchange:
        call, sampled = self.call, self.sampled
        engine = self._replica.engine if self._replica else None
        reply = self.reply() if sampled or self._finish_reason else None
        logprobs = None
        if self._logprobs is not None:
            with np.errstate(over="ignore"):  # what is too large for a float is infinite, which the checks see
                logprobs = np.array(self._logprobs, dtype=np.float32)  # None becomes NaN, which they see, too
        exchange = Exchange(
            exchange_id=self.exchange_id,
            session_id=call.session.session_id,
            seq=self.seq,
            dialect=call.dialect.name,
            params=call.params,
            hints=call.hints,
            wire=call.wire,
            status=status,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            ended_at=time.time(),
            reply=reply,
            error=error,
            prompt_ids=self._prompt_ids,
            sampled_ids=_array(sampled),
            logprobs=logprobs,
            logprob_kind="none" if logprobs is None or engine is None else engine.capabilities.logprobs,
            delivered=delivered,
            sampling=engine.defaults(call.request.sampling) if engine else call.request.sampling,
            versions=self._versions.spans(len(sampled)),
            replica=self._replica.url if self._replica else "",
            finish_reason=reply.finish_reason if reply and self._finish_reason else None,
            usage=reply.usage if reply else Usage(),
            routed_experts=self._routed_experts,
        )
        if (rendered := self._rendered) is not None:
            exchange.continuation = rendered.continuation
            exchange.parent = rendered.parent
            exchange.branch_reason = rendered.branch_reason
            exchange.context = rendered.mark
            exchange.malformed = self.malformed
        exchange.untrainable = untrainable(
            exchange, call.request, tokens=len(sampled), aligned=self._aligned, wants_logprobs=wants_logprobs
        )
        return exchange


def _array(sampled: list[int]) -> Ids | None:
    """None where there are none, or where they are numbers that no token has."""
    try:
        return np.frombuffer(array("i", sampled), dtype=np.int32) if sampled else None
    except OverflowError:
        return None


class _Versions:
    """Which policy sampled which tokens: as the engine reports it, or as far as we can know.

    An engine's labels count only where somebody keeps them up to date: labels that are all older than the version that
    the replica is known to have may be leftovers. Unless it is one that keeps them itself (`believed`): such an engine
    may have come back with other weights than it was given, so that only what it says counts.
    """

    def __init__(self, version: int = 0, *, believed: bool = False) -> None:
        self.reported: list[VersionSpan] | None = None
        self._believed = believed
        self._spans: list[VersionSpan] = []
        self._version = version
        self._start = 0
        self._known = True

    def change(self, version: int, sampled: int, *, known: bool) -> None:
        self._known = self._known and known
        self._spans = self.spans(sampled)
        self._version, self._start = version, sampled

    def spans(self, sampled: int) -> list[VersionSpan]:
        """None (an empty list) where unknown."""
        if self._believed:
            return self.reported or []
        if self.reported and max(span.version for span in self.reported) >= self._version:
            return self.reported
        if not self._known:
            return []
        return (
            [*self._spans, VersionSpan(self._version, self._start, sampled)] if sampled > self._start else self._spans
        )

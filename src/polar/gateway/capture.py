"""What one model call turned out to be: collected chunk by chunk, and in the end an Exchange for the store."""

import asyncio
import logging
import time
from array import array

import numpy as np
from msgspec import Struct

from polar import ids
from polar.dialects.base import Dialect
from polar.engines.base import Chunk, TokenPrompt
from polar.engines.replica import Replica
from polar.errors import ApiError
from polar.gateway.meter import Clock
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.session_registry import OpenSession
from polar.gateway.trainability import find_untrainable_reason
from polar.records.exchange import (
    ContextMark,
    Continuation,
    Exchange,
    ExchangeStatus,
    RawRequest,
    StartedCall,
    TokenIds,
    VersionSpan,
)
from polar.reply_parts import PartsBuilder
from polar.types import (
    FinishReason,
    ReasoningDelta,
    Reply,
    Request,
    TokenLogprob,
    ToolCallStart,
    Usage,
)

log = logging.getLogger(__name__)

_SLOW_START_SECONDS = 5.0  # seconds after which an engine should have begun
_COUNTED_WAIT_SECONDS = 1.0  # seconds that a call may wait for the engine as part of its session's time


class HarnessCall(Struct, frozen=True):
    """What a harness asked for, understood: all that does not change while it is answered."""

    session: OpenSession
    dialect: Dialect
    params: dict[str, str]
    hints: dict[str, str]
    body: bytes
    raw_request: RawRequest
    request: Request

    def is_retry_of(self, other: "HarnessCall") -> bool:
        """The same request once more, as a client sends it after a broken connection."""
        return self.body == other.body and self.params == other.params and self.dialect is other.dialect


class PreparedPrompt(Struct):
    """A prompt of our own, and how it came about."""

    prompt: TokenPrompt
    request: Request  # with plain function tools
    text_tail: str  # of the prompt's text
    continuation: Continuation
    parent: str | None
    branch_reason: str | None
    context_mark: ContextMark | None


class Capture:
    def __init__(self, call: HarnessCall, seq: int) -> None:
        self.call = call
        self.seq = seq
        self.exchange_id = ids.new_exchange_id()
        self.created = int(time.time())
        self.sampled: list[int] = []
        self._started_at = time.time()
        self._first_token_at: float | None = None
        self._logprobs: list[float | None] | None = None
        self._logprobs_aligned = True  # every chunk's log-probabilities are those of its own tokens
        self._alternatives: list[TokenLogprob] = []
        self._prompt_ids: TokenIds | None = None
        self._prompt_json: bytes | None = None  # until the end, when there is time to read it
        self._parts = PartsBuilder()
        self._tool_call_count = 0
        self._usage = Usage()
        self._rendered: PreparedPrompt | None = None
        self._routed_experts: bytes | None = None
        self.malformed = False
        self._hold_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._stop_sequence: str | None = None
        self._replica: Replica | None = None
        self._versions = _VersionTracker()

    @property
    def started_call(self) -> StartedCall:
        call = self.call
        return StartedCall(
            exchange_id=self.exchange_id,
            session_id=call.session.session_id,
            seq=self.seq,
            dialect=call.dialect.name,
            list_name=call.raw_request.list_name,
            model=call.request.model,
            started_at=self._started_at,
            request_bytes=len(call.body),
        )

    def set_prompt(self, rendered: PreparedPrompt) -> None:
        """The prompt is ours: its ids are known before anything is sampled."""
        self._rendered = rendered
        self._prompt_ids = rendered.prompt.ids
        self._usage.prompt = len(rendered.prompt.ids)

    def assign_replica(self, replica: Replica) -> None:
        """The call goes to this replica (and to another, if it gets no answer there)."""
        self._replica = self.call.session.replica = replica
        self._versions = _VersionTracker(
            replica.version, trusts_engine=replica.engine.capabilities.reports_weight_version
        )
        if replica.weights_lost:
            self._versions.change(replica.version, 0, boundary_known=False)
        if not self.call.request.stream:
            self.mark_begun()  # its first chunk will be its last

    # What the session's clock is told.

    def start_waiting(self, *, paused: bool) -> None:
        """For the engine to begin."""
        loop = asyncio.get_running_loop()
        self._hold_timer = loop.call_later(0 if paused else _COUNTED_WAIT_SECONDS, self._clock.hold, self)

    def mark_begun(self) -> None:
        self._has_begun = True
        self._cancel_hold_timer()
        if self._replica is None or not self._replica.frozen:
            self._clock.mark_busy(self)

    def on_frozen(self) -> None:
        self._clock.hold(self)

    def on_thawed(self) -> None:
        if self._has_begun:
            self._clock.mark_busy(self)  # another goes on waiting

    def finish(self, error: ApiError | None, *, given_up: bool) -> None:
        """`error` is what it failed with. Who gives a call up that has not begun for long has waited for the engine;
        who gives up another has reasons of its own."""
        self._cancel_hold_timer()
        self._clock.release(self)
        meter = self.call.session.meter
        meter.add_tokens(max(0, self._usage.completion - len(self.sampled)))  # of an engine that tells no ids
        late = time.time() - self._started_at > _SLOW_START_SECONDS and not self._has_begun
        if error is not None and (late or not given_up):
            meter.record_failure(self.exchange_id, error)

    @property
    def _clock(self) -> Clock:
        return self.call.session.meter.clock

    def _cancel_hold_timer(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    def on_version_changed(self, version: int, *, frozen: bool) -> None:
        """The weights changed under this call. Where it stood still meanwhile, the boundary is here; else nobody knows.
        Nor where nothing has come yet: an engine that replies whole may have sampled much."""
        self._versions.change(version, len(self.sampled), boundary_known=frozen and bool(self.sampled))

    def add_chunk(self, chunk: Chunk) -> None:
        if chunk.ids:
            if self._first_token_at is None:
                self._first_token_at = time.time()
            self.sampled += chunk.ids
            self.call.session.meter.add_tokens(len(chunk.ids))
        if chunk.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += chunk.logprobs
            self._logprobs_aligned = self._logprobs_aligned and len(chunk.logprobs) == len(chunk.ids)
        if chunk.alternatives is not None:
            self._alternatives += chunk.alternatives
        for event in chunk.events:
            if isinstance(event, ToolCallStart):
                event.id = ids.make_call_id(self.exchange_id, self._tool_call_count)
                self._tool_call_count += 1
            elif isinstance(event, ReasoningDelta) and chunk.reasoning_tokens is None:
                self._reasoning_tokens += len(chunk.ids)
            self._parts.add(event)
        self._reasoning_tokens += chunk.reasoning_tokens or 0
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

    def build_reply(self) -> Reply:
        """The turn as it stands."""
        usage = self._usage
        if not usage.prompt and self._prompt_ids is not None:
            usage.prompt = len(self._prompt_ids)
        usage.completion = usage.completion or len(self.sampled)
        usage.reasoning = usage.reasoning or min(self._reasoning_tokens, usage.completion)
        finish = self._finish_reason or "stop"
        if finish == "stop" and self._tool_call_count:
            finish = "tool_calls"
        return Reply(
            self.exchange_id,
            self.call.request.model,
            self.created,
            self._parts.build(),
            finish,
            self._stop_sequence,
            usage,
            self._alternatives or None,
        )

    def parse_prompt_ids(self, parser: PromptIdParser) -> None:
        """Reads the prompt's ids, where the engine gave them as JSON; what is no list of ids counts as none."""
        if self._prompt_json is not None and self._prompt_ids is None:
            try:
                self._prompt_ids = parser.parse(self.call.session.session_id, self._prompt_json)
            except (ValueError, OverflowError, RecursionError) as error:
                log.warning("exchange %s: the engine's prompt ids can't be read: %s", self.exchange_id, error)

    def build_exchange(
        self, status: ExchangeStatus, delivered: int, error: str | None, *, wants_logprobs: bool
    ) -> Exchange:
        call, sampled = self.call, self.sampled
        engine = self._replica.engine if self._replica else None
        reply = self.build_reply() if sampled or self._finish_reason else None
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
            raw_request=call.raw_request,
            status=status,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            ended_at=time.time(),
            reply=reply,
            error=error,
            prompt_ids=self._prompt_ids,
            sampled_ids=_to_ids(sampled),
            logprobs=logprobs,
            logprob_kind="none" if logprobs is None or engine is None else engine.capabilities.logprobs,
            delivered=delivered,
            sampling=engine.apply_sampling_defaults(call.request.sampling) if engine else call.request.sampling,
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
            exchange.context_mark = rendered.context_mark
            exchange.malformed = self.malformed
        exchange.untrainable = find_untrainable_reason(
            exchange, call.request, tokens=len(sampled), aligned=self._logprobs_aligned, wants_logprobs=wants_logprobs
        )
        return exchange


def _to_ids(sampled: list[int]) -> TokenIds | None:
    """None where there are none, or where they are numbers that no token has."""
    try:
        return np.frombuffer(array("i", sampled), dtype=np.int32) if sampled else None
    except OverflowError:
        return None


class _VersionTracker:
    """Which policy sampled which tokens: as the engine reports it, or as far as we can know.

    An engine's labels count only where somebody keeps them up to date: labels that are all older than the version that
    the replica is known to have may be leftovers. Unless it is one that keeps them itself (`believed`): such an engine
    may have come back with other weights than it was given, so that only what it says counts.
    """

    def __init__(self, version: int = 0, *, trusts_engine: bool = False) -> None:
        self.reported: list[VersionSpan] | None = None
        self._trusts_engine = trusts_engine
        self._spans: list[VersionSpan] = []
        self._version = version
        self._start = 0
        self._boundaries_known = True

    def change(self, version: int, sampled: int, *, boundary_known: bool) -> None:
        self._boundaries_known = self._boundaries_known and boundary_known
        self._spans = self.spans(sampled)
        self._version, self._start = version, sampled

    def spans(self, sampled: int) -> list[VersionSpan]:
        """None (an empty list) where unknown."""
        if self._trusts_engine:
            return self.reported or []
        if self.reported and max(span.version for span in self.reported) >= self._version:
            return self.reported
        if not self._boundaries_known:
            return []
        return (
            [*self._spans, VersionSpan(self._version, self._start, sampled)] if sampled > self._start else self._spans
        )

"""What one model call turned out to be: collected chunk by chunk, and in the end an Exchange for the store.

    HarnessCall, PreparedPrompt, Chunks --> TokenRecord --> Reply (so far, or whole)
                                                |
                                                +--> Exchange, checked (`find_untrainable_reason`)

A record has no clock and waits for nothing: the same chunks make the same Exchange. A call that fails a check is kept
whole and marked with the reason; nothing is repaired.
"""

import logging
from array import array

import numpy as np

from polar import ids
from polar.engines.base import Chunk, Engine
from polar.gateway.call import HarnessCall, PreparedPrompt
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.records.exchange import SENTINEL_LOGPROB, Exchange, ExchangeStatus, StartedCall, TokenIds, VersionSpan
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


class TokenRecord:
    def __init__(self, call: HarnessCall, started: StartedCall) -> None:
        self.sampled: list[int] = []
        self.reported_versions: list[VersionSpan] | None = None  # as the engine labels the tokens
        self.malformed = False
        self.exchange_id = started.exchange_id
        self.created = int(started.started_at)
        self._call = call
        self._started = started
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
        self._reasoning_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._stop_sequence: str | None = None

    def set_prompt(self, rendered: PreparedPrompt) -> None:
        """The prompt is ours: its ids are known before anything is sampled."""
        self._rendered = rendered
        self._prompt_ids = rendered.prompt.ids
        self._usage.prompt = len(rendered.prompt.ids)

    def add_chunk(self, chunk: Chunk) -> None:
        if chunk.ids:
            self.sampled += chunk.ids
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
            self.reported_versions = chunk.versions
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            self._stop_sequence = chunk.stop_sequence

    @property
    def tokens_come_at_once(self) -> bool:
        """Whether the engine hands over each token as it is sampled: ids are streamed, without a parser on the way."""
        return self._call.request.stream and self._rendered is not None

    @property
    def unlisted_tokens(self) -> int:
        """Sampled tokens that the engine counted without listing their ids."""
        return max(0, self._usage.completion - len(self.sampled))

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
            self._call.request.model,
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
                self._prompt_ids = parser.parse(self._started.session_id, self._prompt_json)
            except (ValueError, OverflowError, RecursionError) as error:
                log.warning("exchange %s: the engine's prompt ids can't be read: %s", self.exchange_id, error)

    def build_exchange(
        self,
        status: ExchangeStatus,
        delivered: int,
        error: str | None,
        *,
        engine: Engine | None,
        versions: list[VersionSpan],
        first_token_at: float | None,
        ended_at: float,
        wants_logprobs: bool,
    ) -> Exchange:
        """`engine` is where the call ran last; `versions` are those of the sampled tokens, empty where unknown."""
        call, started, sampled = self._call, self._started, self.sampled
        reply = self.build_reply() if sampled or self._finish_reason else None
        logprobs = None
        if self._logprobs is not None:
            with np.errstate(over="ignore"):  # what is too large for a float is infinite, which the checks see
                logprobs = np.array(self._logprobs, dtype=np.float32)  # None becomes NaN, which they see, too
        exchange = Exchange(
            exchange_id=self.exchange_id,
            session_id=started.session_id,
            seq=started.seq,
            dialect=started.dialect,
            params=call.params,
            hints=call.hints,
            raw_request=call.raw_request,
            status=status,
            started_at=started.started_at,
            first_token_at=first_token_at,
            ended_at=ended_at,
            reply=reply,
            error=error,
            prompt_ids=self._prompt_ids,
            sampled_ids=_to_ids(sampled),
            logprobs=logprobs,
            logprob_kind="none" if logprobs is None or engine is None else engine.capabilities.logprobs,
            delivered=delivered,
            sampling=engine.apply_sampling_defaults(call.request.sampling) if engine else call.request.sampling,
            versions=versions,
            replica=engine.url if engine else "",
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


def find_untrainable_reason(
    exchange: Exchange, request: Request, *, tokens: int, aligned: bool, wants_logprobs: bool
) -> str | None:
    """The reason why no token of this call may be trained on, or None. Machine-readable, one word.

    `tokens` is how many ids the engine reported; `aligned`, whether each came together with its log-probability.
    """
    sampled = exchange.sampled_ids
    counted = exchange.usage.completion  # by the engine itself, where it does
    if exchange.reply is None:
        return "no_reply"
    if not tokens:
        return "no_token_ids" if exchange.reply.parts else "no_tokens"
    if sampled is None or sampled.min() < 0:
        return "token_ids_invalid"
    if counted and tokens != counted:
        return "token_ids_short" if tokens < counted else "token_ids_long"
    if exchange.prompt_ids is None:
        return "no_prompt_ids"
    if exchange.prompt_ids.min(initial=0) < 0:
        return "prompt_ids_invalid"
    if exchange.finish_reason == "abort":
        return "aborted"
    if not _covers_all_tokens(exchange.versions, tokens):
        return "version_unknown"
    if wants_logprobs and (reason := _find_logprob_fault(exchange, tokens, aligned)):
        return reason
    if exchange.logprob_kind != "processed":
        # Masking changes the distribution that was sampled from; raw log-probabilities don't know of it.
        if request.response_format.kind != "text":
            return "structured_output"
        if request.tool_choice.forces_call:
            return "forced_tool"
    return None


def _covers_all_tokens(spans: list[VersionSpan], tokens: int) -> bool:
    """Whether each token has exactly one version."""
    at = 0
    for span in spans:
        if span.start != at or span.stop <= at or not 0 <= span.version < 2**31:
            return False
        at = span.stop
    return at == tokens


def _find_logprob_fault(exchange: Exchange, sampled: int, aligned: bool) -> str | None:
    logprobs = exchange.logprobs
    if logprobs is None:
        return "logprobs_missing"
    if len(logprobs) != sampled:
        return "logprobs_short" if len(logprobs) < sampled else "logprobs_long"
    if not aligned:
        return "logprobs_misaligned"
    if logprobs.min() > SENTINEL_LOGPROB and logprobs.max() <= 1e-3:  # false for NaN
        return None
    if np.isnan(logprobs).any():
        return "logprobs_nan"
    if np.isinf(logprobs).any():
        return "logprobs_infinite"
    return "logprobs_sentinel" if logprobs.min() <= SENTINEL_LOGPROB else "logprobs_positive"

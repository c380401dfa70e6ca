"""What is checked at the door: whether a captured call may be trained on.

A call that fails a check is kept whole and marked with the reason; nothing is repaired.
"""

import numpy as np

from polar.records.exchange import SENTINEL_LOGPROB, Exchange, VersionSpan
from polar.types import Request


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

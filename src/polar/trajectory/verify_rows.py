"""The stored rows, checked by themselves: nothing has changed since they were taken in, and their numbers fit together.

A row that says why it must not train may hold whatever the engine wrote; one that says nothing must be in order.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from msgspec import Struct

from polar.records.exchange import Exchange, Logprobs, TokenIds
from polar.store.checksum import matches_checksum
from polar.trajectory.verify_contexts import ContextIndex, ExchangeContext

ProblemKind = Literal[
    "checksum",  # the row is not what was taken in
    "ids",  # a number that no token has
    "lengths",  # arrays, or what is said of them, don't fit together
    "delivered",  # more than was sampled
    "untrainable",  # the row's reason not to train is false, or one is missing
    "parent",  # goes on from an exchange that isn't there
    "unreadable",  # the store itself can't put the row together again
    "unknown",  # handed out, but not in the rows
    "structure",  # arrays, spans or nodes of what is handed out don't fit together
    "context",  # a token trains behind others than it was sampled behind
    "token",  # another id than was sampled
    "logprob",
    "version",
    "mask",  # trains, but no exchange sampled it; or the other way round
    "twice",  # trains more than once, or trains and is excluded
    "lost",  # neither trains nor is excluded
    "reason",  # excluded for a reason that is false
    "forbidden",  # trains, although the row says that it must not
    "weight",
    "counts",
    "reward",
]


class Problem(Struct, frozen=True):
    """Something that must not be. `kind` is for machines, `message` for people."""

    session_id: str
    exchange_id: str | None
    kind: ProblemKind
    message: str


MIN_LOGPROB = -1000.0
"""No sampled token is this unlikely: engines write such numbers where they have none."""
MAX_LOGPROB = 1e-3
"""A log-probability is at most 0, but for rounding."""


def check_records(
    exchanges: Iterable[Exchange], *, vocabulary_size: int | None = None, contexts: ContextIndex | None = None
) -> list[Problem]:
    """A session's rows, in any order. `vocabulary`: how many tokens the model has, where that is known. `contexts`, an
    empty one, is filled on the way."""
    contexts = ContextIndex() if contexts is None else contexts
    problems: list[Problem] = []
    parents: list[tuple[Exchange, str]] = []
    seen: dict[str, int] = {}
    exchanges = sorted(exchanges, key=lambda exchange: exchange.seq)
    max_id = np.iinfo(np.int32).max if vocabulary_size is None else vocabulary_size - 1
    ids: list[TokenIds] = []
    logprobs: list[Logprobs] = []
    checked_contexts: set[ExchangeContext] = set()  # whose tokens are looked at
    has_checksums = False
    for exchange in exchanges:
        seen[exchange.exchange_id] = exchange.seq
        context = contexts.add(exchange)
        if exchange.checksum is not None:
            has_checksums = True
            if not matches_checksum(exchange, context.digest_prompt()):
                problems.append(
                    _make_problem(
                        exchange,
                        "checksum",
                        "its tokens, log-probabilities or versions have changed since they were stored",
                    )
                )
        elif has_checksums:
            problems.append(_make_problem(exchange, "checksum", "it has none, and earlier ones have"))
        if exchange.parent is not None:
            parents.append((exchange, exchange.parent))
        problems += [_make_problem(exchange, kind, message) for kind, message in _check_record(exchange)]
        if exchange.untrainable is None:
            # What a sound prompt shares with another was looked at there.
            ids += context.prompt[context.num_shared if context.base in checked_contexts else 0 :], context.sampled
            checked_contexts.add(context)
            if exchange.logprobs is not None:
                logprobs.append(exchange.logprobs)
    if not _are_ids(ids, max_id) or not _are_logprobs(logprobs):
        problems += [
            _make_problem(exchange, kind, message)
            for exchange in exchanges
            if exchange.untrainable is None
            for kind, message in _check_numbers(exchange, max_id)
        ]
    problems += [
        _make_problem(exchange, "parent", f"it goes on from {parent}, which is itself or not there")
        for exchange, parent in parents
        if seen.get(parent, exchange.seq) == exchange.seq
    ]
    return problems


def _make_problem(exchange: Exchange, kind: ProblemKind, message: str) -> Problem:
    return Problem(exchange.session_id, exchange.exchange_id, kind, message)


def _check_record(exchange: Exchange) -> Iterator[tuple[ProblemKind, str]]:
    """All but the numbers in its arrays."""
    if (claim := exchange.untrainable) is not None:
        if _claim_holds(exchange, claim) is False:
            yield "untrainable", f"it is marked {claim}, which is not so"
        return
    prompt, sampled, logprobs = exchange.prompt_ids, exchange.sampled_ids, exchange.logprobs
    if prompt is None or sampled is None or not len(sampled):
        yield "untrainable", "it has no prompt or no sampled tokens, and gives no reason"
        return
    if not 0 <= exchange.delivered <= len(sampled):
        yield "delivered", f"{exchange.delivered} tokens of {len(sampled)} are said to be delivered"
    if exchange.finish_reason == "abort":
        yield "untrainable", "its sampling was broken off, and it gives no reason"
    position = 0
    for span in exchange.versions:
        if span.start != position or span.stop <= span.start or span.version < 0:
            yield (
                "version",
                f"the versions don't cover the tokens one by one: {span.version} at {span.start}:{span.stop}",
            )
        position = span.stop
    if position != len(sampled):
        yield "version", f"the versions end at {position}, and {len(sampled)} tokens were sampled"
    if logprobs is None:
        if exchange.logprob_kind != "none":
            yield "logprob", f"its {exchange.logprob_kind} log-probabilities are missing"
    elif len(logprobs) != len(sampled):
        yield "lengths", f"{len(logprobs)} log-probabilities for {len(sampled)} sampled tokens"


# Numbers, of all rows at once: only where one is wrong does it matter whose it is.


def _are_ids(arrays: list[TokenIds], max_id: int) -> bool:
    found = np.concatenate(arrays) if arrays else _EMPTY
    return not len(found) or bool(found.min() >= 0 and found.max() <= max_id)


def _are_logprobs(arrays: list[Logprobs]) -> bool:
    found = np.concatenate(arrays) if arrays else _EMPTY
    return bool(((found > MIN_LOGPROB) & (found <= MAX_LOGPROB)).all())  # so that NaN is wrong


_EMPTY = np.empty(0, np.int32)


def _check_numbers(exchange: Exchange, max_id: int) -> Iterator[tuple[ProblemKind, str]]:
    prompt, sampled, logprobs = exchange.prompt_ids, exchange.sampled_ids, exchange.logprobs
    for what, ids in (("prompt", prompt), ("sampled", sampled)):
        if ids is not None and len(wrong := np.flatnonzero((ids < 0) | (ids > max_id))):
            yield "ids", f"{what} token {wrong[0]} is {ids[wrong[0]]}, which no token is"
    if logprobs is not None and len(wrong := np.flatnonzero(~((logprobs > MIN_LOGPROB) & (logprobs <= MAX_LOGPROB)))):
        yield "logprob", f"that of sampled token {wrong[0]} is {logprobs[wrong[0]]}"


def _versions_cover_tokens(exchange: Exchange) -> bool:
    """Whether each sampled token has one version."""
    at = 0
    for span in exchange.versions:
        if span.start != at or span.stop <= at or not 0 <= span.version < 2**31:
            return False
        at = span.stop
    return at == (0 if exchange.sampled_ids is None else len(exchange.sampled_ids))


def _claim_holds(exchange: Exchange, claim: str) -> bool | None:
    """Whether a reason not to train is true; None where the row can't tell."""
    sampled, logprobs = exchange.sampled_ids, exchange.logprobs
    numbers = np.zeros(0, np.float32) if logprobs is None else logprobs
    match claim:
        case "no_reply":
            return exchange.reply is None
        case "no_tokens" | "no_token_ids":
            return sampled is None
        case "no_prompt_ids":
            return exchange.prompt_ids is None
        case "version_unknown":
            return not _versions_cover_tokens(exchange)
        case "aborted":
            return exchange.finish_reason == "abort"
        case "logprobs_missing":
            return logprobs is None
        case "logprobs_nan":
            return bool(np.isnan(numbers).any())
        case "logprobs_infinite":
            return bool(np.isinf(numbers).any())
        case "logprobs_sentinel":
            return bool((numbers <= MIN_LOGPROB).any())
        case "logprobs_positive":
            return bool((numbers > MAX_LOGPROB).any())
    return None

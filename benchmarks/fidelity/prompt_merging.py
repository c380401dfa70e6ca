"""Merging turns by comparing prompts only, as NVIDIA's Polar (arXiv 2605.24220) does in its public builder.

Written anew from what that builder does, to be run on the same recorded exchanges:

1. A call joins the chain whose last *prompt* its own prompt begins with, token for token; of several, the one with the
   longest. A call that joins none begins a chain. What was sampled is never compared.
2. A chain becomes one trace. It begins with the first prompt; then come, call by call, the sampled ids with their
   log-probabilities (these train), and what stands between two turns (that doesn't). What stands between is taken from
   the later prompt: of all that goes beyond the earlier prompt, the part behind the first end-of-turn token, or from it
   on where the sampled turn did not end in one itself. That token is the last one of the chain's first turn that ended
   by itself.
3. Where a prompt goes beyond the earlier one without an end-of-turn token, the chain ends, and whatever came behind is
   in no trace. It is not reported either. (A reply that never arrived, then the same prompt again, is such a case.)

So the sampled ids of a turn stand in the trace where the next call's prompt had that turn's re-tokenised text, and
every token behind the first difference trains in a context that no call had.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.fidelity.counts import BuiltSession, TrainingSequence
from polar.records.exchange import Exchange, TokenIds
from polar.records.spans import Span

NAME = "prompt_merging"
_ENDS_ITSELF = ("stop", "tool_calls")


def build(exchanges: Sequence[Exchange]) -> BuiltSession:
    """Of the calls for which an engine reported ids, in the order in which they arrived."""
    calls = [
        it for it in sorted(exchanges, key=lambda it: it.seq) if it.sampled_ids is not None and len(it.sampled_ids)
    ]
    trained = [_merge_chain(chain) for chain in _make_chains(calls)]
    return BuiltSession(NAME, len(trained), sum(len(it.ids) for it in trained), trained, excluded=[])


def _make_chains(calls: Sequence[Exchange]) -> list[list[Exchange]]:
    chains: list[list[Exchange]] = []
    for call in calls:
        prompt = _get_prompt(call)
        open_chains = [chain for chain in chains if _starts_with(prompt, _get_prompt(chain[-1]))]
        if open_chains:
            max(open_chains, key=lambda chain: len(_get_prompt(chain[-1]))).append(call)
        else:
            chains.append([call])
    return chains


def _merge_chain(chain: Sequence[Exchange]) -> TrainingSequence:
    end = next((int(_get_sampled(it)[-1]) for it in chain if it.finish_reason in _ENDS_ITSELF), None)
    first = chain[0]
    pieces = [_get_prompt(first)]
    logprobs = [np.zeros(len(_get_prompt(first)), np.float32)]
    spans: list[Span] = []
    length = len(_get_prompt(first))
    before: Exchange | None = None
    for call in chain:
        if before is not None:
            between = _find_between(before, call, end)
            if between is None:
                break
            pieces.append(between)
            logprobs.append(np.zeros(len(between), np.float32))
            length += len(between)
        sampled = _get_sampled(call)
        assert call.logprobs is not None
        pieces.append(sampled)
        logprobs.append(call.logprobs)
        spans.append(Span(call.exchange_id, length, length + len(sampled), 0))
        length += len(sampled)
        before = call
    return TrainingSequence(np.concatenate(pieces), np.concatenate(logprobs), spans)


def _find_between(before: Exchange, call: Exchange, end: int | None) -> TokenIds | None:
    """What a prompt has between the earlier turn and its own; None where no end-of-turn token says so."""
    beyond = _get_prompt(call)[len(_get_prompt(before)) :]
    if end is None or end not in beyond:
        return None
    at = int(np.argmax(beyond == end))
    return beyond[at + 1 :] if _get_sampled(before)[-1] == end else beyond[at:]


def _starts_with(prompt: TokenIds, beginning: TokenIds) -> bool:
    return len(beginning) <= len(prompt) and bool(np.array_equal(prompt[: len(beginning)], beginning))


def _get_prompt(call: Exchange) -> TokenIds:
    assert call.prompt_ids is not None
    return call.prompt_ids


def _get_sampled(call: Exchange) -> TokenIds:
    assert call.sampled_ids is not None
    return call.sampled_ids

"""How true training data is to what was sampled, counted token by token from the recorded exchanges.

A builder's result, whoever's it is, comes here as `TrainingSequence`s: the tokens that a trainer runs through its
model, and which of them train as which sampled tokens. Each of those is looked at twice, by ways that share nothing:

    stored exchange    the tokens up to and with it are those of the exchange that sampled it
    engine             its log-probability is the one that the scripted engine gives it in this place

Nothing of `polar.trajectory` but its nouns is used: the counts do not rest on the code that they judge.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from polar.engines.scripted.sampler import context_states, expected_logprobs
from polar.records.exchange import Exchange, Logprobs, TokenIds
from polar.records.spans import ExcludedSpan, Span
from polar.records.trajectory import Trajectory, TreeTrajectory

_VERSION = 0  # of the policy, all the time


class TrainingSequence(Struct):
    """A sequence as it goes through a trainer's model. Spans and log-probabilities are by positions in `ids`."""

    ids: TokenIds
    logprobs: Logprobs
    spans: list[Span]


class BuiltSession(Struct):
    """What a builder made of a session."""

    builder: str
    traces: int
    computed: int  # tokens that a trainer runs through its model
    trained: list[TrainingSequence]
    excluded: list[ExcludedSpan]


class FidelityCounts(Struct):
    """Tokens, but for the traces."""

    builder: str
    traces: int
    computed: int
    unique: int  # tokens that must be computed: each prefix of a trained token once
    trained: int
    wrong_context: int  # trained, and not where they were sampled
    wrong_logprob: int  # trained with a log-probability that the engine does not give them there
    lost: int  # delivered, and neither trained nor excluded with a reason


def count_tokens(built: BuiltSession, exchanges: Sequence[Exchange]) -> FidelityCounts:
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    spans = [(sequence, span) for sequence in built.trained for span in sequence.spans]
    return FidelityCounts(
        builder=built.builder,
        traces=built.traces,
        computed=built.computed,
        unique=_count_unique(built.trained),
        trained=sum(span.stop - span.start for _, span in spans),
        wrong_context=sum(
            _count_wrong_contexts(sequence.ids, span, by_id[span.exchange_id]) for sequence, span in spans
        ),
        wrong_logprob=sum(_count_wrong_logprobs(sequence, span) for sequence, span in spans),
        lost=_count_lost(by_id, (span for _, span in spans), built.excluded),
    )


def build_session_from_traces(trajectory: Trajectory) -> BuiltSession:
    trained = []
    for trace in trajectory.traces:
        assert trace.logprobs is not None  # the scripted engine gives them always
        context = len(trace.prompt_ids)
        spans = [Span(it.exchange_id, it.start + context, it.stop + context, it.offset) for it in trace.spans]
        logprobs = np.concatenate([np.zeros(context, np.float32), trace.logprobs])
        trained.append(TrainingSequence(np.concatenate([trace.prompt_ids, trace.response_ids]), logprobs, spans))
    return BuiltSession(
        trajectory.builder, len(trained), sum(len(it.ids) for it in trained), trained, trajectory.excluded
    )


def build_session_from_tree(tree: TreeTrajectory) -> BuiltSession:
    """One trace, since it is computed in one go. Each term is looked at behind all that stands above it."""
    trained = []
    for term in tree.terms:
        assert term.logprobs is not None
        above = int(tree.depths[term.node])
        ids = _collect_path(tree, term.node)[: above + term.stop]
        logprobs = np.concatenate([np.zeros(above + term.start, np.float32), term.logprobs])
        span = Span(term.exchange_id, above + term.start, above + term.stop, term.offset)
        trained.append(TrainingSequence(ids, logprobs, [span]))
    return BuiltSession("prefix_tree", 1 if trained else 0, len(tree.ids), trained, tree.excluded)


def _collect_path(tree: TreeTrajectory, node: int) -> TokenIds:
    pieces = []
    while node >= 0:
        pieces.append(tree.ids[tree.starts[node] : tree.starts[node + 1]])
        node = int(tree.parents[node])
    return np.concatenate(pieces[::-1])


def _count_wrong_contexts(ids: TokenIds, span: Span, exchange: Exchange) -> int:
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    if span.start != len(exchange.prompt_ids) + span.offset:
        return span.stop - span.start
    sampled = np.concatenate([exchange.prompt_ids, exchange.sampled_ids])[: span.stop]
    other = np.flatnonzero(ids[: span.stop] != sampled)
    return span.stop - max(int(other[0]), span.start) if len(other) else 0


def _count_wrong_logprobs(sequence: TrainingSequence, span: Span) -> int:
    expected = expected_logprobs(_VERSION, sequence.ids[: span.start], sequence.ids[span.start : span.stop])
    return int(np.count_nonzero(expected != sequence.logprobs[span.start : span.stop]))


def _count_unique(trained: Iterable[TrainingSequence]) -> int:
    """The engine's state after each prefix is a 64-bit hash of it."""
    states = [context_states(_VERSION, it.ids[: max(span.stop for span in it.spans)])[1:] for it in trained if it.spans]
    return len(np.unique(np.concatenate(states))) if states else 0


def _count_lost(exchanges: Mapping[str, Exchange], spans: Iterable[Span], excluded: Iterable[ExcludedSpan]) -> int:
    missing = {exchange_id: np.ones(exchange.delivered, bool) for exchange_id, exchange in exchanges.items()}
    for span in spans:
        missing[span.exchange_id][span.offset : span.offset + span.stop - span.start] = False
    for reason in excluded:
        missing[reason.exchange_id][reason.start : reason.stop] = False
    return sum(int(np.count_nonzero(it)) for it in missing.values())

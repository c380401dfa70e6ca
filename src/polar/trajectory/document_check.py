"""Checks a received document without the store: whether it is consistent in itself.

The service has compared every number with the stored rows before it sent them (checker.py). A trainer can check whether
the arrays fit together, whether each sampling trains once, whether the numbers are plausible, and whether a session's
weights add up to 1. So it notices a document that was cut, mixed up or not made by the service.

A problem of a whole tree has no session id: it is every session's.
"""

from collections.abc import Callable, Iterable, Sequence
from math import isclose

import numpy as np
from numpy.typing import NDArray

from polar.records.exchange import Logprobs, TokenIds
from polar.records.session import HeldBackError, HoldReason
from polar.records.spans import ExcludedSpan
from polar.records.trajectory import NO_VERSION, PolicyVersions, Term, Trace, Trajectory, TreeTrajectory
from polar.trajectory.checker import SessionChecker, is_in_checked_share
from polar.trajectory.verify import describe_malformed_tree
from polar.trajectory.verify_rows import MAX_LOGPROB, MIN_LOGPROB, Problem, ProblemKind


def find_hold_reason(
    checker: SessionChecker, session_id: str, find_problems: Callable[[], Sequence[Problem]]
) -> HoldReason | None:
    """Returns why a received session must not be trained on; None if it may, or is not in the checked share."""
    if not is_in_checked_share(session_id, checker.share):
        checker.watcher.record_skip()
        return None
    failure: HeldBackError | None = None
    try:
        checker.run_check(session_id, find_problems)
    except HeldBackError as error:
        failure = error
    checker.watcher.record_check(failure)
    return None if failure is None else failure.reason


class _Findings:
    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self.problems: list[Problem] = []

    def add(
        self, kind: ProblemKind, message: str, exchange_id: str | None = None, session_id: str | None = None
    ) -> None:
        self.problems.append(
            Problem(self._session_id if session_id is None else session_id, exchange_id, kind, message)
        )


# Traces


def check_received(trajectory: Trajectory) -> list[Problem]:
    findings = _Findings(trajectory.session_id)
    total = sum(int(np.count_nonzero(trace.loss_mask)) for trace in trajectory.traces)
    computed = 0
    sampled: list[tuple[str, int, int]] = []
    for number, trace in enumerate(trajectory.traces):
        where = f"trace {number}"
        computed += len(trace.prompt_ids) + len(trace.response_ids)
        if _check_shape(findings, trace, where):
            _check_trace(findings, trajectory, trace, total, where)
            sampled += [(span.exchange_id, span.offset, span.offset + span.stop - span.start) for span in trace.spans]
    _check_coverage(findings, sampled, trajectory.excluded)
    counts = trajectory.tokens
    if (counts.trainable, counts.computed) != (total, computed):
        announced = f"{counts.computed} computed and {counts.trainable} trainable tokens are announced"
        findings.add("counts", f"{announced}, and there are {computed} and {total}")
    if trajectory.reward is not None and trajectory.reason is not None:
        findings.add("reward", f"it has the reward {trajectory.reward} and the reason {trajectory.reason}")
    return findings.problems


def _check_shape(findings: _Findings, trace: Trace, where: str) -> bool:
    """Whether arrays and spans fit together. Only then can the rest be checked."""
    length = len(trace.response_ids)
    arrays = (trace.loss_mask, trace.policy_versions, *(() if trace.logprobs is None else (trace.logprobs,)))
    if any(len(array) != length for array in arrays):
        findings.add("structure", f"{where}: its arrays are not as long as its response of {length} tokens")
        return False
    reached = 0
    for span in trace.spans:
        if not reached <= span.start < span.stop <= length or span.offset < 0:
            findings.add(
                "structure", f"{where}: {span} is no part of its response, or is out of order", span.exchange_id
            )
            return False
        reached = span.stop
    if not length or reached != length:
        findings.add("structure", f"{where}: it does not end with a token that trains")
        return False
    return True


def _check_trace(findings: _Findings, trajectory: Trajectory, trace: Trace, total: int, where: str) -> None:
    mask = np.zeros(len(trace.response_ids), np.uint8)
    for span in trace.spans:
        mask[span.start : span.stop] = 1
    if (trace.loss_mask != mask).any():
        findings.add("mask", f"{where}: its mask is not that of its spans")
    trained = mask == 1
    _check_ids(findings, np.concatenate((trace.prompt_ids, trace.response_ids)), where)
    _check_numbers(
        findings, trace.policy_versions[trained], None if trace.logprobs is None else trace.logprobs[trained], where
    )
    if (trace.policy_versions[~trained] != NO_VERSION).any():
        findings.add("version", f"{where}: a token that nobody sampled has a version")
    if trace.logprobs is not None and trace.logprobs[~trained].any():
        findings.add("logprob", f"{where}: a token that nobody sampled has a log-probability")
    if trace.session_id != trajectory.session_id:
        findings.add("unknown", f"{where}: it is of session {trace.session_id}")
    if trace.exchange_ids != [span.exchange_id for span in trace.spans]:
        findings.add("structure", f"{where}: its exchanges are not those of its spans")
    count = int(np.count_nonzero(trained))
    if not isclose(trace.weight, count / max(total, 1), rel_tol=1e-9):
        findings.add("weight", f"{where}: {trace.weight} for {count} of {total} tokens")
    if trace.reward != trajectory.reward:
        findings.add("reward", f"{where}: the reward {trace.reward}, and its session has {trajectory.reward}")


# Trees


def check_received_tree(tree: TreeTrajectory) -> list[Problem]:
    findings = _Findings("")
    malformation = describe_malformed_tree(tree, with_images=True)  # which images there are, only the service knows
    if malformation is not None:
        findings.add("structure", f"prefix_tree: {malformation}")
        return findings.problems
    _check_ids(findings, tree.ids, "prefix_tree")
    session_ids = {session.session_id for session in tree.sessions}
    totals: dict[str, int] = dict.fromkeys(session_ids, 0)
    exchanges: dict[tuple[str, str], list[Term]] = {}
    for term in tree.terms:
        totals[term.session_id] = totals.get(term.session_id, 0) + term.stop - term.start
        exchanges.setdefault((term.session_id, term.exchange_id), []).append(term)
    for (session_id, exchange_id), terms in exchanges.items():
        session_findings = _Findings(session_id)
        if session_id not in session_ids:
            session_findings.add(
                "unknown", "prefix_tree: it has tokens, and is none of the tree's sessions", exchange_id
            )
        _check_terms(session_findings, tree, terms, totals[session_id])
        findings.problems += session_findings.problems
    by_session: dict[str, list[tuple[str, int, int]]] = {}
    for term in tree.terms:
        sampled = term.exchange_id, term.offset, term.offset + term.stop - term.start
        by_session.setdefault(term.session_id, []).append(sampled)
    session_by_exchange = {exchange_id: session_id for session_id, exchange_id in exchanges}
    for session_id, sampled_ranges in by_session.items():
        session_findings = _Findings(session_id)
        excluded = [span for span in tree.excluded if session_by_exchange.get(span.exchange_id) == session_id]
        _check_coverage(session_findings, sampled_ranges, excluded)
        findings.problems += session_findings.problems
    trainable = sum(term.stop - term.start for term in tree.terms)
    if (tree.tokens.unique, tree.tokens.trainable) != (len(tree.ids), trainable):
        announced = f"{tree.tokens.unique} unique and {tree.tokens.trainable} trainable tokens are announced"
        findings.add("counts", f"prefix_tree: {announced}, and there are {len(tree.ids)} and {trainable}")
    for session in tree.sessions:
        if session.reward is not None and session.reason is not None:
            message = f"prefix_tree: it has the reward {session.reward} and the reason {session.reason}"
            findings.add("reward", message, session_id=session.session_id)
    return findings.problems


def _check_terms(findings: _Findings, tree: TreeTrajectory, terms: Iterable[Term], total: int) -> None:
    """Checks the terms of one exchange, which must follow one another along one path."""
    previous: Term | None = None
    for term in sorted(terms, key=lambda term: term.offset):
        count = term.stop - term.start
        size = int(tree.starts[term.node + 1] - tree.starts[term.node]) if 0 <= term.node < len(tree.parents) else -1
        arrays = (term.policy_versions, *(() if term.logprobs is None else (term.logprobs,)))
        if not 0 <= term.start < term.stop <= size or term.offset < 0 or any(len(array) != count for array in arrays):
            message = f"prefix_tree: node {term.node} has no tokens {term.start}:{term.stop} with the term's arrays"
            findings.add("structure", message, term.exchange_id)
            return
        _check_numbers(findings, term.policy_versions, term.logprobs, "prefix_tree", term.exchange_id)
        if not isclose(term.weight, count / max(total, 1), rel_tol=1e-9):
            findings.add("weight", f"prefix_tree: {term.weight} for {count} of {total} tokens", term.exchange_id)
        if previous is not None and not _follows_directly(tree, previous, term):
            message = f"prefix_tree: sampled token {term.offset} does not stand behind the one before it"
            findings.add("context", message, term.exchange_id)
        previous = term


def _follows_directly(tree: TreeTrajectory, previous: Term, term: Term) -> bool:
    if term.node == previous.node:
        return term.start - previous.start == term.offset - previous.offset
    size = int(tree.starts[previous.node + 1] - tree.starts[previous.node])
    at_edge = previous.stop == size and term.start == 0 and int(tree.parents[term.node]) == previous.node
    return at_edge and term.offset == previous.offset + previous.stop - previous.start


# Of both


def _check_ids(findings: _Findings, ids: TokenIds, where: str) -> None:
    wrong = ids < 0
    if wrong.any():
        first = int(wrong.argmax())
        findings.add("ids", f"{where}: token {first} is {ids[first]}, which no token is")


def _check_numbers(
    findings: _Findings, versions: PolicyVersions, logprobs: Logprobs | None, where: str, exchange_id: str | None = None
) -> None:
    if (versions < 0).any():
        findings.add("version", f"{where}: a sampled token has the version {versions.min()}", exchange_id)
    if logprobs is not None:
        wrong: NDArray[np.bool_] = ~((logprobs > MIN_LOGPROB) & (logprobs <= MAX_LOGPROB))  # so that NaN is wrong
        if wrong.any():
            value = logprobs[int(wrong.argmax())]
            findings.add("logprob", f"{where}: a sampled token has the log-probability {value}", exchange_id)


def _check_coverage(
    findings: _Findings, sampled: Iterable[tuple[str, int, int]], excluded: Iterable[ExcludedSpan]
) -> None:
    """Checks that each exchange's trainable and excluded tokens cover its sampled tokens without gaps, each once."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for exchange_id, start, stop in sampled:
        parts.setdefault(exchange_id, []).append((start, stop))
    for span in excluded:
        parts.setdefault(span.exchange_id, []).append((span.start, span.stop))
    for exchange_id, ranges in parts.items():
        reached = 0
        for start, stop in sorted(ranges):
            if start < reached:
                findings.add("twice", f"sampled token {start} trains, or is excluded, more than once", exchange_id)
            elif start > reached:
                findings.add("lost", f"sampled tokens {reached}:{start} neither train nor are excluded", exchange_id)
            reached = max(reached, stop)

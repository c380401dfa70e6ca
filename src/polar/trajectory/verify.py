"""The invariant, checked on what the builders hand out, against the rows that are stored.

    check_records      the rows by themselves (verify_rows.py)
    check_trajectory   traces against the rows
    check_tree         a tree, of one session or of a group, against the rows

For every token that trains: the tokens before it are those that the engine conditioned on; its id, its log-probability
(bit for bit) and its policy version are those of the row. And every sampled token trains exactly once, or is excluded
for a reason that the row bears out.

This is the other side of the books. It shares no code with the token tree and the builders, only the nouns: plain walks
over arrays, each exchange's context once, so that a mistake there can't hide here.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.records.exchange import Exchange, Logprobs, TokenIds
from polar.records.session import Session
from polar.records.spans import TRAINABLE_ROLES, ExchangeRole, ExcludedSpan
from polar.records.trajectory import (
    NO_VERSION,
    Image,
    PolicyVersions,
    Term,
    TokenPath,
    Trace,
    Trajectory,
    TreeTrajectory,
)
from polar.trajectory.verify_contexts import ContextIndex, ExchangeContext
from polar.trajectory.verify_rows import Problem, ProblemKind, check_records

__all__ = ["ContextIndex", "Problem", "RecordedSession", "check_records", "check_trajectory", "check_tree"]

_UNKNOWN_VERSION = -2
"""Of a token that the row knows no version of: equal to nothing that is handed out."""
_MIN_MEMORY_CHECK_TOKENS = 1000
"""Tokens that are compared sooner than it is found out where they lie."""


class RecordedExchange(Struct):
    """One row's tokens. What trains is `sampled[:trains]`."""

    session_id: str
    exchange_id: str
    prompt: TokenIds
    sampled: TokenIds
    logprobs: Logprobs | None
    versions: PolicyVersions
    delivered: int
    untrainable: str | None
    role: ExchangeRole
    num_trainable: int
    images: list[Image]
    context: ExchangeContext

    def get_ids(self, start: int, stop: int) -> TokenIds:
        """Of the prompt and the sampled tokens, one after the other."""
        edge = len(self.prompt)
        if stop <= edge:
            return self.prompt[start:stop]
        if start >= edge:
            return self.sampled[start - edge : stop - edge]
        return np.concatenate((self.prompt[start:], self.sampled[: stop - edge]))


class RecordedSession:
    """A session as its rows have it. Which role a call has, and which images stand in a prompt, is no number of a row
    but is read from its request: it comes with `paths`. `contexts` are those that `check_records` has found."""

    def __init__(
        self,
        session: Session,
        exchanges: Iterable[Exchange],
        paths: Iterable[TokenPath] = (),
        *,
        trainable_roles: frozenset[ExchangeRole] = TRAINABLE_ROLES,
        contexts: ContextIndex | None = None,
    ) -> None:
        self.session = session
        self.trainable_roles = trainable_roles
        exchanges = list(exchanges)
        self._contexts = ContextIndex(exchanges) if contexts is None else contexts
        known = {path.exchange_id: path for path in paths}
        self.entries = {it.exchange_id: self._make_entry(it, known.get(it.exchange_id)) for it in exchanges}
        self.num_trainable = sum(entry.num_trainable for entry in self.entries.values())

    def _make_entry(self, exchange: Exchange, path: TokenPath | None) -> RecordedExchange:
        none: TokenIds = np.empty(0, np.int32)
        prompt = none if exchange.prompt_ids is None else exchange.prompt_ids
        sampled = none if exchange.sampled_ids is None else exchange.sampled_ids
        versions: PolicyVersions = np.full(len(sampled), _UNKNOWN_VERSION, np.int32)
        for span in exchange.versions:
            if 0 <= span.version < 2**31:
                versions[max(span.start, 0) : max(span.stop, 0)] = span.version
        role: ExchangeRole = "main" if path is None else path.role
        allowed = exchange.untrainable is None and role in self.trainable_roles
        return RecordedExchange(
            session_id=exchange.session_id,
            exchange_id=exchange.exchange_id,
            prompt=prompt,
            sampled=sampled,
            logprobs=exchange.logprobs,
            versions=versions,
            delivered=exchange.delivered,
            untrainable=exchange.untrainable,
            role=role,
            num_trainable=max(0, min(exchange.delivered, len(sampled))) if allowed else 0,
            images=[] if path is None else path.images,
            context=self._contexts[exchange.exchange_id],
        )

    def supports_exclusion(self, entry: RecordedExchange, excluded: ExcludedSpan) -> bool:
        if excluded.reason == "undelivered":
            return excluded.start >= entry.delivered
        if excluded.reason.startswith("role_"):
            return excluded.reason == f"role_{entry.role}" and entry.role not in self.trainable_roles
        return excluded.reason == entry.untrainable


class _TokenAudit:
    """Collects the problems, and counts what became of each sampled token."""

    def __init__(self, sessions: Sequence[RecordedSession]) -> None:
        self.problems: list[Problem] = []
        self._sessions = {recorded.session.session_id: recorded for recorded in sessions}
        self._entries = {id: entry for recorded in sessions for id, entry in recorded.entries.items()}
        # What became of each sampled token: of all exchanges together, and by exchange as views on that.
        ends = np.cumsum([0, *(len(entry.sampled) for entry in self._entries.values())]).tolist()
        self._all_trained = np.zeros(ends[-1], np.int32)
        self._all_excluded = np.zeros(ends[-1], np.int32)
        self._all_allowed = np.zeros(ends[-1], bool)
        self._trained: dict[str, NDArray[np.int32]] = {}
        self._excluded: dict[str, NDArray[np.int32]] = {}
        for (id, entry), start, stop in zip(self._entries.items(), ends[:-1], ends[1:], strict=True):
            self._trained[id] = self._all_trained[start:stop]
            self._excluded[id] = self._all_excluded[start:stop]
            self._all_allowed[start : start + entry.num_trainable] = True

    def add_problem(self, entry: RecordedExchange, kind: ProblemKind, message: str) -> None:
        self.problems.append(Problem(entry.session_id, entry.exchange_id, kind, message))

    def add_session_problem(
        self, session_id: str, kind: ProblemKind, message: str, exchange_id: str | None = None
    ) -> None:
        self.problems.append(Problem(session_id, exchange_id, kind, message))

    def find_entry(self, session_id: str, exchange_id: str, where: str) -> RecordedExchange | None:
        """The row that is meant; a problem, and None, where that session has none such."""
        entry = self._entries.get(exchange_id)
        if entry is None or entry.session_id != session_id:
            self.add_session_problem(session_id, "unknown", f"{where}: the session has no such exchange", exchange_id)
            return None
        return entry

    def mark_trained(self, entry: RecordedExchange, offset: int, mask: NDArray[np.uint8]) -> None:
        """From its sampled token `offset` on, those whose mask is 1 train here."""
        self._trained[entry.exchange_id][offset : offset + len(mask)] += mask != 0

    def check_numbers(
        self, entry: RecordedExchange, offset: int, logprobs: Logprobs | None, versions: PolicyVersions, where: str
    ) -> None:
        """Log-probabilities and versions that are handed out, against the row's from its sampled token `offset` on."""
        stop = offset + len(versions)
        if (at := _find_first_difference(versions, entry.versions[offset:stop])) is not None:
            row = entry.versions[offset + at]
            said = "unknown" if row == _UNKNOWN_VERSION else row
            self.add_problem(
                entry, "version", f"{where}: sampled token {offset + at} has {versions[at]}, and the row {said}"
            )
        if logprobs is None or entry.logprobs is None:
            if (logprobs is None) != (entry.logprobs is None):
                self.add_problem(entry, "logprob", f"{where}: log-probabilities are missing, here or in the row")
        elif len(entry.logprobs) < stop:
            self.add_problem(entry, "logprob", f"{where}: the row has only {len(entry.logprobs)} log-probabilities")
        elif (at := _find_first_difference(_as_bits(logprobs), _as_bits(entry.logprobs[offset:stop]))) is not None:
            row = entry.logprobs[offset + at]
            self.add_problem(
                entry, "logprob", f"{where}: sampled token {offset + at} has {logprobs[at]}, and the row {row}"
            )

    def mark_excluded(self, spans: Iterable[ExcludedSpan]) -> None:
        for excluded in spans:
            entry = self._entries.get(excluded.exchange_id)
            if entry is None:
                first = next(iter(self._sessions))
                self.add_session_problem(first, "unknown", "excluded: there is no such exchange", excluded.exchange_id)
                continue
            if not 0 <= excluded.start <= excluded.stop <= len(entry.sampled):
                self.add_problem(
                    entry, "structure", f"excluded: {excluded.start}:{excluded.stop} of {len(entry.sampled)} tokens"
                )
                continue
            self._excluded[entry.exchange_id][excluded.start : excluded.stop] += 1
            if not self._sessions[entry.session_id].supports_exclusion(entry, excluded):
                self.add_problem(
                    entry, "reason", f"tokens {excluded.start}:{excluded.stop} are excluded as {excluded.reason}"
                )

    def check_coverage(self) -> None:
        """Every sampled token trains once, or is excluded once; and none trains that must not."""
        once = (self._all_trained + self._all_excluded) == 1
        if once.all() and not (self._all_trained > self._all_allowed).any():
            return
        for id, entry in self._entries.items():
            trained, excluded = self._trained[id], self._excluded[id]
            total = trained + excluded
            findings: tuple[tuple[ProblemKind, NDArray[np.bool_], str], ...] = (
                ("lost", total == 0, "neither train nor are excluded"),
                ("twice", total > 1, "train or are excluded more than once"),
                ("forbidden", (trained > 0) & (np.arange(len(trained)) >= entry.num_trainable), "train, and must not"),
            )
            for kind, wrong, what in findings:
                if len(at := np.flatnonzero(wrong)):
                    self.add_problem(entry, kind, f"{len(at)} sampled tokens {what}, the first is {at[0]}")

    def check_weight(
        self, session_id: str, weight: float, tokens: int, where: str, exchange_id: str | None = None
    ) -> None:
        total = self._sessions[session_id].num_trainable
        if total and not isclose(weight, tokens / total, rel_tol=1e-9):
            self.add_session_problem(
                session_id, "weight", f"{where}: {weight} for {tokens} of {total} tokens", exchange_id
            )

    def check_verdict(self, session: Session, reward: float | None, reason: str | None, where: str) -> None:
        """A reward or a reason, never both; and the reward is the session's."""
        if reward != session.reward or (reward is not None and reason is not None):
            said = f"reward {reward}, reason {reason}"
            self.add_session_problem(
                session.session_id, "reward", f"{where}: {said}, and the session has the reward {session.reward}"
            )

    def check_turn_rewards(
        self, session: Session, exchange_ids: Iterable[str], turn_rewards: Mapping[str, float], where: str
    ) -> None:
        """Of the exchanges that train there, those that the session has."""
        known = session.turn_rewards
        if turn_rewards != {id: known[id] for id in exchange_ids if id in known}:
            self.add_session_problem(
                session.session_id, "reward", f"{where}: its turns' rewards are not those of the session"
            )


# Traces


def check_trajectory(recorded: RecordedSession, trajectory: Trajectory) -> list[Problem]:
    audit, session = _TokenAudit([recorded]), recorded.session
    name = trajectory.builder
    if trajectory.session_id != session.session_id:
        audit.add_session_problem(session.session_id, "unknown", f"{name}: it is of session {trajectory.session_id}")
    for number, trace in enumerate(trajectory.traces):
        _check_trace(audit, recorded, trace, f"{name}, trace {number}")
    audit.mark_excluded(trajectory.excluded)
    audit.check_coverage()
    audit.check_verdict(session, trajectory.reward, trajectory.reason, name)
    trainable = sum(int(np.count_nonzero(trace.loss_mask)) for trace in trajectory.traces)
    computed = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in trajectory.traces)
    counts = trajectory.tokens
    if (counts.trainable, counts.computed) != (trainable, computed) or counts.unique > computed:
        said = f"{counts.computed} computed, {counts.unique} unique, {counts.trainable} trainable"
        audit.add_session_problem(
            session.session_id, "counts", f"{name}: {said}; there are {computed} tokens, {trainable} trainable"
        )
    return audit.problems


def _check_trace(audit: _TokenAudit, recorded: RecordedSession, trace: Trace, where: str) -> None:
    session_id = recorded.session.session_id
    length = len(trace.response_ids)
    arrays = (trace.loss_mask, trace.policy_versions, *(() if trace.logprobs is None else (trace.logprobs,)))
    if any(len(array) != length for array in arrays) or trace.session_id != session_id:
        audit.add_session_problem(
            session_id, "structure", f"{where}: its arrays are of other lengths, or it is of another session"
        )
        return
    if _is_exact(recorded, trace):
        for span in trace.spans:
            audit.mark_trained(recorded.entries[span.exchange_id], span.offset, trace.loss_mask[span.start : span.stop])
    else:
        _find_differences(audit, recorded, trace, where)
    if trace.exchange_ids != [span.exchange_id for span in trace.spans]:
        audit.add_session_problem(session_id, "structure", f"{where}: its exchanges are not those of its spans")
    audit.check_weight(session_id, trace.weight, int(np.count_nonzero(trace.loss_mask)), where)
    audit.check_verdict(recorded.session, trace.reward, trace.reason, where)
    audit.check_turn_rewards(recorded.session, trace.exchange_ids, trace.turn_rewards, where)


def _is_exact(recorded: RecordedSession, trace: Trace) -> bool:
    """Whether every token, mask, version and log-probability of a trace is as the rows have it. Quick, and silent about
    what is not: `_find_differences` tells. The trace's tokens are compared with those of the last exchange; the others'
    contexts are known to be the beginning of that."""
    length, context = len(trace.response_ids), len(trace.prompt_ids)
    mask = np.zeros(length, np.uint8)
    versions: PolicyVersions = np.full(length, NO_VERSION, np.int32)
    logprobs = None if trace.logprobs is None else np.zeros(length, np.float32)
    reached = 0  # of the response, by spans
    before: RecordedExchange | None = None
    entry: RecordedExchange | None = None
    for span in trace.spans:
        entry = recorded.entries.get(span.exchange_id)
        start, stop, offset = span.start, span.stop, span.offset
        if entry is None or entry.images or not (reached <= start < stop <= length and offset >= 0):
            return False
        end = offset + stop - start
        if end > len(entry.sampled) or context + start != len(entry.prompt) + offset:
            return False
        if before is not None and entry.context.count_shared_prefix(before.context) < context + reached:
            return False
        mask[start:stop] = 1
        versions[start:stop] = entry.versions[offset:end]
        if logprobs is not None:
            if entry.logprobs is None or len(entry.logprobs) < end:
                return False
            logprobs[start:stop] = entry.logprobs[offset:end]
        elif entry.logprobs is not None:
            return False
        reached, before = stop, entry
    return (
        entry is not None
        and reached == length
        and _are_equal(trace.loss_mask, mask)
        and _are_equal(trace.policy_versions, versions)
        and (trace.logprobs is None or logprobs is None or _are_equal(_as_bits(trace.logprobs), _as_bits(logprobs)))
        and _begins_exchange(trace.prompt_ids, trace.response_ids, entry)
    )


def _begins_exchange(prompt: TokenIds, response: TokenIds, entry: RecordedExchange) -> bool:
    """Whether prompt and response together are the first tokens of an exchange, which has as many."""
    edge = len(entry.prompt)
    if len(prompt) > edge:
        return False
    inner = edge - len(prompt)  # of the response, what stands in the exchange's prompt
    return (
        _are_equal(prompt, entry.prompt[: len(prompt)])
        and _are_equal(response[:inner], entry.prompt[len(prompt) :])
        and _are_equal(response[inner:], entry.sampled[: len(response) - inner])
    )


def _find_differences(audit: _TokenAudit, recorded: RecordedSession, trace: Trace, where: str) -> None:
    """What is wrong with a trace's tokens and numbers, span by span."""
    session_id = recorded.session.session_id
    length = len(trace.response_ids)
    ids = np.concatenate((trace.prompt_ids, trace.response_ids))
    sampled = np.zeros(length, np.uint8)
    entries = []
    for span in trace.spans:
        entry = audit.find_entry(session_id, span.exchange_id, where)
        if entry is None:
            continue
        here, offset = slice(span.start, span.stop), span.offset
        if not (0 <= span.start < span.stop <= length and 0 <= offset <= len(entry.sampled) - (span.stop - span.start)):
            audit.add_problem(entry, "structure", f"{where}: {span} is no part of it, or of what was sampled")
            continue
        sampled[here] += 1
        entries.append(entry)
        _check_ids(audit, entry, ids, len(trace.prompt_ids) + span.start, offset, span.stop - span.start, where)
        logprobs = None if trace.logprobs is None else trace.logprobs[here]
        audit.check_numbers(entry, offset, logprobs, trace.policy_versions[here], where)
        audit.mark_trained(entry, offset, trace.loss_mask[here])
    _check_images(audit, entries, where)
    # Every token that trains was sampled by exactly one exchange, and no other has numbers.
    if (at := _find_first_difference(trace.loss_mask, sampled)) is not None:
        said = f"response token {at} has mask {trace.loss_mask[at]}, and {sampled[at]} exchanges sampled it"
        audit.add_session_problem(session_id, "mask", f"{where}: {said}")
    context = sampled == 0
    if (trace.policy_versions[context] != NO_VERSION).any():
        audit.add_session_problem(session_id, "version", f"{where}: a token that nobody sampled has a version")
    if trace.logprobs is not None and trace.logprobs[context].any():
        audit.add_session_problem(session_id, "logprob", f"{where}: a token that nobody sampled has a log-probability")
    if not length or context[-1]:
        audit.add_session_problem(session_id, "structure", f"{where}: it does not end with a token that trains")


def _check_ids(
    audit: _TokenAudit, entry: RecordedExchange, ids: TokenIds, at: int, offset: int, count: int, where: str
) -> None:
    """`count` tokens of a sequence from `at` on are an exchange's sampled ones from `offset` on, and before them stands
    exactly its context."""
    expected = len(entry.prompt) + offset
    if at != expected:
        said = f"sampled token {offset} stands behind {at} tokens, and was sampled behind {expected}"
        audit.add_problem(entry, "context", f"{where}: {said}")
        return
    differs = _find_first_difference(ids[: at + count], entry.get_ids(0, at + count))
    if differs is not None:
        said = (
            f"token {differs} is {ids[differs]}, and was {entry.get_ids(differs, differs + 1)[0]} when it was sampled"
        )
        audit.add_problem(entry, "context" if differs < at else "token", f"{where}: {said}")


def _check_images(audit: _TokenAudit, entries: Sequence[RecordedExchange], where: str) -> None:
    """All exchanges of a trace saw the same images, each as far as its prompt goes."""
    for entry in entries:
        shown = [image for image in entries[-1].images if image.position < len(entry.prompt)]
        if shown != entry.images:
            audit.add_problem(entry, "context", f"{where}: its prompt showed other images")


# Trees


def check_tree(sessions: Sequence[RecordedSession], tree: TreeTrajectory) -> list[Problem]:
    audit = _TokenAudit(sessions)
    first_session_id = sessions[0].session.session_id if sessions else ""
    with_images = any(entry.images for recorded in sessions for entry in recorded.entries.values())
    malformation = describe_malformed_tree(tree, with_images=with_images)
    if malformation is not None:
        audit.add_session_problem(first_session_id, "structure", f"prefix_tree: {malformation}")
        return audit.problems  # there is nothing to walk on

    terms: dict[tuple[str, str], list[Term]] = {}
    for term in tree.terms:
        terms.setdefault((term.session_id, term.exchange_id), []).append(term)
    trained_to = np.zeros(len(tree.parents), np.int64)
    walk = _TreeWalk(tree, with_images=with_images)
    for (session_id, exchange_id), own in terms.items():
        entry = audit.find_entry(session_id, exchange_id, "prefix_tree")
        if entry is not None:
            _check_terms(audit, entry, own, tree, walk)
            for term in own:
                if 0 <= term.node < len(trained_to):
                    trained_to[term.node] = max(trained_to[term.node], term.stop)

    lengths = np.diff(tree.starts)
    leaves = np.ones(len(tree.parents), bool)
    leaves[tree.parents[tree.parents >= 0]] = False
    if (trained_to[leaves] != lengths[leaves]).any():
        audit.add_session_problem(
            first_session_id, "structure", "prefix_tree: a leaf does not end with a token that trains"
        )
    counts, trainable = tree.tokens, sum(term.stop - term.start for term in tree.terms)
    if (counts.computed, counts.unique, counts.trainable) != (len(tree.ids), len(tree.ids), trainable):
        said = f"{counts.computed} computed, {counts.unique} unique, {counts.trainable} trainable"
        audit.add_session_problem(
            first_session_id, "counts", f"prefix_tree: {said}; there are {len(tree.ids)} tokens, {trainable} trainable"
        )
    audit.mark_excluded(tree.excluded)
    audit.check_coverage()
    tree_sessions = {session.session_id: session for session in tree.sessions}
    if sorted(tree_sessions) != sorted(recorded.session.session_id for recorded in sessions) or len(
        tree_sessions
    ) != len(tree.sessions):
        audit.add_session_problem(first_session_id, "unknown", "prefix_tree: its sessions are not those of the group")
    for recorded in sessions:
        session = recorded.session
        if (it := tree_sessions.get(session.session_id)) is not None:
            audit.check_verdict(session, it.reward, it.reason, "prefix_tree")
            trained = [exchange_id for session_id, exchange_id in terms if session_id == session.session_id]
            audit.check_turn_rewards(session, trained, it.turn_rewards, "prefix_tree")
    return audit.problems


def describe_malformed_tree(tree: TreeTrajectory, *, with_images: bool) -> str | None:
    """What is wrong with the arrays themselves. No two children of a node begin alike (but for images, whose
    placeholders are alike): then each unique token is there once."""
    count = len(tree.parents)
    if len(tree.starts) != count + 1 or len(tree.depths) != count:
        return "its arrays are of different lengths"
    if tree.starts[0] != 0 or tree.starts[-1] != len(tree.ids) or (np.diff(tree.starts) <= 0).any():
        return "the nodes' ids don't lie one behind the other"
    if (tree.parents < -1).any() or (tree.parents >= np.arange(count)).any():
        return "a node does not stand behind its parent"
    ends = tree.depths + np.diff(tree.starts)
    if (tree.depths != np.where(tree.parents < 0, 0, ends[tree.parents] if count else 0)).any():
        return "a node does not begin where its parent ends"
    beginnings = np.stack((tree.parents, tree.ids[tree.starts[:-1]]), axis=1)
    if not with_images and len(np.unique(beginnings, axis=0)) != count:
        return "two children of a node begin with the same token"
    return None


def _check_terms(
    audit: _TokenAudit, entry: RecordedExchange, terms: Sequence[Term], tree: TreeTrajectory, walk: "_TreeWalk"
) -> None:
    placed = []
    for term in terms:
        count = term.stop - term.start
        size = int(tree.starts[term.node + 1] - tree.starts[term.node]) if 0 <= term.node < len(tree.parents) else -1
        arrays = (term.policy_versions, *(() if term.logprobs is None else (term.logprobs,)))
        if not (0 <= term.start < term.stop <= size and 0 <= term.offset <= len(entry.sampled) - count):
            audit.add_problem(
                entry, "structure", f"prefix_tree: node {term.node} has no tokens {term.start}:{term.stop} of it"
            )
            continue
        if any(len(array) != count for array in arrays):
            audit.add_problem(entry, "structure", f"prefix_tree: a term of {count} tokens has arrays of other lengths")
            continue
        audit.mark_trained(entry, term.offset, np.ones(count, np.uint8))
        audit.check_numbers(entry, term.offset, term.logprobs, term.policy_versions, "prefix_tree")
        audit.check_weight(entry.session_id, term.weight, count, "prefix_tree", entry.exchange_id)
        at, expected = int(tree.depths[term.node]) + term.start, len(entry.prompt) + term.offset
        if at != expected:
            said = f"sampled token {term.offset} stands behind {at} tokens, and was sampled behind {expected}"
            audit.add_problem(entry, "context", f"prefix_tree: {said}")
            continue
        placed.append(term)
    if placed:
        walk.check(audit, entry, placed)


class _TreeWalk:
    """Compares exchanges with the paths of a tree that they lie on, from the deepest node to the root.

    Where a walk comes to a node whose path another exchange was compared with, the two exchanges are compared with each
    other instead, at once, if it is not known already how far they are the same: so a walk takes as many steps as it
    finds new nodes.
    """

    def __init__(self, tree: TreeTrajectory, *, with_images: bool) -> None:
        self._tree = tree
        # By node: an exchange whose tokens are those of the node's path, and how many of them.
        self._verified_prefixes: dict[int, tuple[RecordedExchange, int]] = {}
        self._images = _NodeImages() if with_images else None

    def check(self, audit: _TokenAudit, entry: RecordedExchange, terms: Sequence[Term]) -> None:
        """All of an exchange's terms lie on one path, and everything on it up to the last of them is the exchange's."""
        tree = self._tree
        deepest = max(terms, key=lambda term: int(tree.depths[term.node]))
        highest = min(int(tree.depths[term.node]) for term in terms)
        node, stop = deepest.node, int(tree.depths[deepest.node]) + deepest.stop
        walked: dict[int, int] = {}  # nodes, and how far down they were compared
        differs: int | None = None
        while node >= 0 and differs is None:
            start, first = int(tree.depths[node]), int(tree.starts[node])
            known = None if self._images is not None else self._verified_prefixes.get(node)
            if known is not None and start < highest and known[1] >= stop:
                if entry.context.count_shared_prefix(known[0].context) < stop:
                    differs = _find_first_difference(known[0].get_ids(0, stop), entry.get_ids(0, stop))
                break
            walked[node] = stop
            same = 0 if known is None else min(known[1], stop, entry.context.count_shared_prefix(known[0].context))
            since = max(start, same)
            differs = _find_first_difference(
                tree.ids[first + since - start : first + stop - start], entry.get_ids(since, stop)
            )
            if differs is not None:
                differs += since
            if self._images is not None and not self._images.matches(node, start, stop, entry):
                audit.add_problem(entry, "context", "prefix_tree: its prompt showed other images")
            if same > start and start <= highest:
                break  # what is above was compared with the other exchange
            node, stop = int(tree.parents[node]), start
        if differs is not None:
            kind: ProblemKind = "context" if differs < len(entry.prompt) else "token"
            audit.add_problem(
                entry, kind, f"prefix_tree: token {differs} is not the one that it was when it was sampled"
            )
            return
        if any(term.node not in walked for term in terms):
            audit.add_problem(entry, "context", "prefix_tree: its tokens do not lie on one path")
        for node, far in walked.items():
            if node not in self._verified_prefixes or self._verified_prefixes[node][1] <= far:
                self._verified_prefixes[node] = entry, far


class _NodeImages:
    """The images that stand within a node, as far as somebody has walked it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, list[Image]]] = {}

    def matches(self, node: int, start: int, stop: int, entry: RecordedExchange) -> bool:
        """Whether an exchange that passes tokens `start` to `stop` saw what others saw there."""
        shown = [image for image in entry.images if start <= image.position < stop]
        far, known = self._known.setdefault(node, (stop, shown))
        if stop > far:
            self._known[node] = stop, shown
        common = min(stop, far)
        return [it for it in shown if it.position < common] == [it for it in known if it.position < common]


def _find_first_difference(a: NDArray[np.integer], b: NDArray[np.integer]) -> int | None:
    """Where two arrays first differ, if they do. One that ends early differs there."""
    length = min(len(a), len(b))
    unequal = a[:length] != b[:length]
    at = int(unequal.argmax()) if length else 0
    if length and unequal[at]:
        return at
    return None if len(a) == len(b) else length


def _are_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return len(a) == len(b) and (_share_memory(a, b) or not (a != b).any())


def _share_memory(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Views of the same tokens: builders hand out a prompt as it was read."""
    return (
        len(a) > _MIN_MEMORY_CHECK_TOKENS
        and a.__array_interface__["data"] == b.__array_interface__["data"]
        and a.dtype == b.dtype
    )


def _as_bits(logprobs: Logprobs) -> NDArray[np.int32]:
    """So that equal means bit for bit, for NaN as well."""
    return np.ascontiguousarray(logprobs, np.float32).view(np.int32)

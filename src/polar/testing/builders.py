"""The contract of every builder: the invariant of training data, on random sessions.

    class TestMine(BuilderContract):
        plugin = mine                         # SessionPaths -> Trajectory
        # builds_tree = True                  # list of SessionPaths -> TreeTrajectory

For every trainable token: the tokens before it are the ones it was conditioned on, its log-probability and policy
version are those of that sampling, and it trains once. The weights of a session that trains anything add up to 1. The
oracles below read the paths directly and share no code with the builders.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.records import wire
from polar.records.trajectory import NO_VERSION, SessionPaths, TokenPath, Trajectory, TreeTrajectory
from polar.testing.contract import Contract
from polar.testing.token_paths import list_symbols, make_path, make_session_paths, session_groups
from polar.trajectory.document_check import check_received, check_received_tree

TrainedToken = tuple[str, tuple[int, ...], int, float | None, int, Fraction]
"""Session, context, token, log-probability, version, weight."""

SampledToken = tuple[str, int]
"""An exchange id, and the index of one of its sampled tokens."""

_inherited = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


class BuilderContract(Contract):
    kind = "builders"
    builds_tree: ClassVar[bool] = False

    def build(self, sessions: Sequence[SessionPaths]) -> list[Trajectory] | TreeTrajectory:
        if self.builds_tree:
            tree: TreeTrajectory = self.plugin(sessions)
            return tree
        return [self.plugin(session) for session in sessions]

    @given(sessions=session_groups())
    @_inherited
    def test_it_trains_exactly_what_was_sampled(self, sessions: list[SessionPaths]) -> None:
        expected = Counter(token for one in sessions for token in iter_expected_tokens(one))
        assert Counter(iter_trained_tokens(self.build(sessions))) == expected

    @given(sessions=session_groups())
    @_inherited
    def test_each_sampled_token_is_trained_once_or_excluded(self, sessions: list[SessionPaths]) -> None:
        sampled = Counter(
            (one.exchange_id, index) for each in sessions for one in each.paths for index in range(len(one.sampled))
        )
        assert Counter(iter_accounted_tokens(self.build(sessions))) == sampled

    @given(sessions=session_groups())
    @_inherited
    def test_weights_and_counts(self, sessions: list[SessionPaths]) -> None:
        built = self.build(sessions)
        for one in sessions:
            weights = [weight for session_id, weight in _iter_weights(built) if session_id == one.session_id]
            assert math.isclose(sum(weights), 1.0 if one.num_trainable else 0.0)
        if isinstance(built, TreeTrajectory):
            unique = count_needed_tokens([path for one in sessions for path in one.paths])
            trainable = sum(one.num_trainable for one in sessions)
            assert (built.tokens.computed, built.tokens.unique, built.tokens.trainable) == (unique, unique, trainable)
            assert len(built.ids) == unique
            return
        for one, trajectory in zip(sessions, built, strict=True):
            computed = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in trajectory.traces)
            assert trajectory.tokens.computed == computed >= trajectory.tokens.unique == count_needed_tokens(one.paths)
            assert trajectory.tokens.trainable == one.num_trainable

    @given(sessions=session_groups(), order=st.randoms())
    @_inherited
    def test_the_order_in_which_paths_are_given_does_not_matter(
        self, sessions: list[SessionPaths], order: random.Random
    ) -> None:
        shuffled = [msgspec.structs.replace(one, paths=order.sample(one.paths, len(one.paths))) for one in sessions]
        assert _to_wire(self.build(shuffled)) == _to_wire(self.build(sessions))

    @given(sessions=session_groups())
    @_inherited
    def test_a_trainer_accepts_it(self, sessions: list[SessionPaths]) -> None:
        """Its arrays fit together, and nothing of a session is lost on the way."""
        built = self.build(sessions)
        if isinstance(built, TreeTrajectory):
            assert check_received_tree(built) == []
            assert [(one.session_id, one.reward, one.reason) for one in built.sessions] == [
                (one.session_id, one.reward, one.reason) for one in sessions
            ]
            return
        for one, trajectory in zip(sessions, built, strict=True):
            assert check_received(trajectory) == []
            assert (trajectory.session_id, trajectory.reward, trajectory.reason) == (
                one.session_id,
                one.reward,
                one.reason,
            )
            for trace in trajectory.traces:
                context = trace.loss_mask == 0
                assert (trace.policy_versions[context] == NO_VERSION).all()
                assert trace.logprobs is None or (trace.logprobs[context] == 0).all()

    def test_a_session_that_trains_nothing(self) -> None:
        nothing = [
            SessionPaths("empty", [], None, "timeout"),
            make_session_paths(make_path(0, [1, 2], [3, 4], trainable=0, session_id="undelivered"), reward=0.0),
        ]
        built = self.build(nothing)
        assert list(iter_trained_tokens(built)) == []
        assert sorted(iter_accounted_tokens(built)) == [("undelivered-x0", 0), ("undelivered-x0", 1)]

    def test_its_input_is_left_as_it_is(self) -> None:
        def make() -> list[SessionPaths]:
            return [
                make_session_paths(
                    make_path(0, [1, 2], [3, 4]), make_path(1, [1, 2, 3, 4, 5], [6], trainable=0), reward=0.5
                )
            ]

        sessions = make()
        self.build(sessions)
        assert repr(sessions) == repr(make())


# What the paths train


def iter_expected_tokens(session: SessionPaths) -> Iterator[TrainedToken]:
    """The tokens that a session trains, read from its paths."""
    total = sum(path.num_trainable for path in session.paths)
    for path in session.paths:
        tokens = (*path.prompt.tolist(), *path.sampled.tolist())
        for index in range(path.num_trainable):
            at = len(path.prompt) + index
            logprob = None if path.logprobs is None else float(path.logprobs[index])
            assert path.versions is not None
            yield path.session_id, tokens[:at], tokens[at], logprob, int(path.versions[index]), Fraction(1, total)


def count_needed_tokens(paths: Sequence[TokenPath]) -> int:
    """Distinct prefixes that end in a trainable token or stand before path."""
    needed: set[tuple[Any, ...]] = set()
    for path in paths:
        if path.num_trainable:
            needed.update(list_symbols(path)[:length] for length in range(1, len(list_symbols(path)) + 1))
    return len(needed)


# What the builder's output trains


def iter_trained_tokens(built: Trajectory | list[Trajectory] | TreeTrajectory) -> Iterator[TrainedToken]:
    if isinstance(built, TreeTrajectory):
        yield from _iter_tree_tokens(built)
        return
    for trajectory in [built] if isinstance(built, Trajectory) else built:
        for trace in trajectory.traces:
            tokens = (*trace.prompt_ids.tolist(), *trace.response_ids.tolist())
            weight = Fraction(trace.weight / trace.loss_mask.sum()).limit_denominator(10_000)
            for index in trace.loss_mask.nonzero()[0].tolist():
                at = len(trace.prompt_ids) + index
                logprob = None if trace.logprobs is None else float(trace.logprobs[index])
                yield trace.session_id, tokens[:at], tokens[at], logprob, int(trace.policy_versions[index]), weight


def _iter_tree_tokens(built: TreeTrajectory) -> Iterator[TrainedToken]:
    def ids(node: int) -> tuple[int, ...]:
        return tuple(built.ids[built.starts[node] : built.starts[node + 1]].tolist())

    for term in built.terms:
        before: tuple[int, ...] = ()
        node = term.node
        while (node := int(built.parents[node])) >= 0:
            before = ids(node) + before
        assert len(before) == built.depths[term.node]
        weight = Fraction(term.weight / (term.stop - term.start)).limit_denominator(10_000)
        for index in range(term.start, term.stop):
            context = before + ids(term.node)[:index]
            logprob = None if term.logprobs is None else float(term.logprobs[index - term.start])
            version = int(term.policy_versions[index - term.start])
            yield term.session_id, context, ids(term.node)[index], logprob, version, weight


def iter_accounted_tokens(built: list[Trajectory] | TreeTrajectory) -> Iterator[SampledToken]:
    """Yields each sampled token as often as it trains or is excluded."""
    if isinstance(built, TreeTrajectory):
        for term in built.terms:
            yield from _iter_span(term.exchange_id, term.offset, term.offset + term.stop - term.start)
    for trajectory in [] if isinstance(built, TreeTrajectory) else built:
        for trace in trajectory.traces:
            assert sum(span.stop - span.start for span in trace.spans) == trace.loss_mask.sum()
            for span in trace.spans:
                yield from _iter_span(span.exchange_id, span.offset, span.offset + span.stop - span.start)
    for one in [built] if isinstance(built, TreeTrajectory) else built:
        for excluded in one.excluded:
            yield from _iter_span(excluded.exchange_id, excluded.start, excluded.stop)


def _iter_span(exchange_id: str, start: int, stop: int) -> Iterator[SampledToken]:
    return ((exchange_id, index) for index in range(start, stop))


def _iter_weights(built: list[Trajectory] | TreeTrajectory) -> Iterator[tuple[str, float]]:
    if isinstance(built, TreeTrajectory):
        return ((term.session_id, term.weight) for term in built.terms)
    return ((trace.session_id, trace.weight) for trajectory in built for trace in trajectory.traces)


def _to_wire(built: list[Trajectory] | TreeTrajectory) -> Any:
    if isinstance(built, TreeTrajectory):
        return wire.tree_to_dict(built)
    return [wire.trajectory_to_dict(trajectory) for trajectory in built]

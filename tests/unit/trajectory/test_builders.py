"""What builders make of sessions. What all builders keep: tests/contract/test_builders.py."""

import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.records import wire
from polar.records.trajectory import NO_VERSION, SessionPaths, TokenPath, Trace, Trajectory
from polar.testing.token_paths import list_symbols, make_path, make_session_paths, sampled_sessions, session_groups
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree

TRACE_BUILDERS = [per_request, prefix_merging]


def extends(later: TokenPath, earlier: TokenPath) -> bool:
    """Whether a trace that ends with `earlier` can go on with `later`, read off the paths."""
    seen = list_symbols(earlier)
    prompt = list_symbols(msgspec.structs.replace(later, num_trainable=0))
    return prompt[: len(seen)] == seen and (later.logprobs is None) == (earlier.logprobs is None)


def fewest(paths: list[TokenPath]) -> tuple[int, int]:
    """The least number of runs and of tokens in them, by matching each path with one that follows it. What is computed
    are the paths that none follows; so the longest are matched first, and never go without a follower again."""
    precedes: dict[int, int] = {}

    def place(index: int, tried: set[int]) -> bool:
        for later in range(len(paths)):
            if later != index and later not in tried and extends(paths[later], paths[index]):
                tried.add(later)
                if later not in precedes or place(precedes[later], tried):
                    precedes[later] = index
                    return True
        return False

    by_length = sorted(range(len(paths)), key=lambda index: -len(list_symbols(paths[index])))
    last = [index for index in by_length if not place(index, set())]
    return len(last), sum(len(list_symbols(paths[index])) for index in last)


# Merging, and the order of a group, on random sessions


@given(sampled_sessions())
def test_merged_traces_are_runs_of_exact_prefixes_and_as_few_as_can_be(session: SessionPaths) -> None:
    paths = {it.exchange_id: it for it in session.paths}
    made = prefix_merging(session)
    for trace in made.traces:
        run = [paths[exchange_id] for exchange_id in trace.exchange_ids]
        assert all(extends(later, earlier) for earlier, later in pairwise(run))
        assert (*trace.prompt_ids.tolist(), *trace.response_ids.tolist()) == tuple(
            it for it, _ in list_symbols(run[-1])
        )
        assert trace.loss_mask[0] == trace.loss_mask[-1] == 1
        context = trace.loss_mask == 0
        assert (trace.policy_versions[context] == NO_VERSION).all()
        assert trace.logprobs is None or (trace.logprobs[context] == 0).all()
    assert (len(made.traces), made.tokens.computed) == fewest([it for it in session.paths if it.num_trainable])


@given(session_groups(), st.randoms())
def test_the_order_of_a_groups_sessions_does_not_change_its_tree(
    sessions: list[SessionPaths], order: random.Random
) -> None:
    tree = wire.tree_to_dict(prefix_tree(sessions))
    shuffled = order.sample(sessions, len(sessions))
    other = wire.tree_to_dict(prefix_tree(shuffled))
    assert other["nodes"] == tree["nodes"]
    assert sorted(map(repr, other["terms"])) == sorted(map(repr, tree["terms"]))


# What it means for sessions as they happen


def runs(made: Trajectory) -> list[list[str]]:
    return [trace.exchange_ids for trace in made.traces]


def test_a_conversation_is_one_trace() -> None:
    turns = make_session_paths(make_path(0, [1, 2], [3, 4]), make_path(1, [1, 2, 3, 4, 5], [6]), reward=0.5)
    (trace,) = prefix_merging(turns).traces
    assert trace.prompt_ids.tolist() == [1, 2]
    assert trace.response_ids.tolist() == [3, 4, 5, 6]
    assert trace.loss_mask.tolist() == [1, 1, 0, 1]
    assert trace.logprobs is not None
    assert trace.logprobs.tolist() == [-1 / 64, -2 / 64, 0, -1 / 64 - 1]
    assert trace.policy_versions.tolist() == [0, 0, NO_VERSION, 1]
    assert [(span.start, span.stop) for span in trace.spans] == [(0, 2), (3, 4)]
    assert (trace.weight, trace.reward, trace.reason) == (1.0, 0.5, None)
    assert (trace.branch_reason, trace.temperature, trace.finish_reason) == ("reason 0", None, "finish 1")
    assert runs(per_request(turns)) == [["s-x0"], ["s-x1"]]


def test_a_changed_token_in_the_history_begins_a_new_trace() -> None:
    """The trap of merging by prompts alone: prompt 1 extends prompt 0, but not what was sampled after it."""
    made = prefix_merging(make_session_paths(make_path(0, [1, 2], [3, 4]), make_path(1, [1, 2, 3, 9, 5], [6])))
    assert runs(made) == [["s-x0"], ["s-x1"]]
    assert made.traces[1].prompt_ids.tolist() == [1, 2, 3, 9, 5]
    assert [trace.weight for trace in made.traces] == [2 / 3, 1 / 3]


def test_a_turn_goes_on_from_the_part_of_it_that_was_delivered() -> None:
    made = prefix_merging(
        make_session_paths(make_path(0, [1], [2, 3, 4, 5], trainable=2), make_path(1, [1, 2, 3, 8], [9]))
    )
    assert runs(made) == [["s-x0", "s-x1"]]
    assert made.traces[0].response_ids.tolist() == [2, 3, 8, 9]
    assert [(it.exchange_id, it.start, it.stop) for it in made.excluded] == [("s-x0", 2, 4)]


def test_what_does_not_train_lengthens_nothing() -> None:
    dropped = make_session_paths(
        make_path(0, [1], [2, 3], trainable=0), make_path(1, [1], [4]), make_path(2, [1, 4, 5, 5, 5], [6], trainable=0)
    )
    for build in TRACE_BUILDERS:
        (trace,) = build(dropped).traces
        assert (*trace.prompt_ids.tolist(), *trace.response_ids.tolist()) == (1, 4)
    tree = prefix_tree([dropped])
    assert tree.ids.tolist() == [1, 4]
    assert len(tree.excluded) == 2


def test_two_samplings_of_one_token_are_two_traces_and_one_node() -> None:
    twice = make_session_paths(make_path(0, [1], [2]), make_path(1, [1], [2]), make_path(2, [1, 2], [3]))
    assert runs(prefix_merging(twice)) == [["s-x0"], ["s-x1", "s-x2"]]
    tree = prefix_tree([twice])
    assert tree.ids.tolist() == [1, 2, 3]
    assert [(term.exchange_id, term.start, term.stop) for term in tree.terms] == [
        ("s-x0", 1, 2),
        ("s-x1", 1, 2),
        ("s-x2", 2, 3),
    ]


def test_of_several_that_could_go_on_the_longest_does() -> None:
    fork = make_session_paths(
        make_path(0, [1], [2]), make_path(1, [1, 2], [3]), make_path(2, [1, 2], [4]), make_path(3, [1, 2, 4], [5])
    )
    made = prefix_merging(fork)
    assert runs(made) == [["s-x0", "s-x2", "s-x3"], ["s-x1"]]
    assert made.traces[1].prompt_ids.tolist() == [1, 2]


def test_an_agent_goes_on_with_its_own_trace_before_its_subagents_do() -> None:
    """A sub-agent that is started with all of its parent's context (codex does so)."""
    made = prefix_merging(
        make_session_paths(
            make_path(0, [1], [2], agent_id="main"),
            make_path(1, [1, 2, 7], [7, 7, 7], agent_id="sub", role="subagent"),
            make_path(2, [1, 2, 8], [8], agent_id="main"),
        )
    )
    assert [(trace.agent_id, trace.exchange_ids) for trace in made.traces] == [
        ("main", ["s-x0", "s-x2"]),
        ("sub", ["s-x1"]),
    ]


def test_a_run_has_log_probabilities_or_has_none() -> None:
    """One call without them must not cost the others theirs."""
    made = prefix_merging(
        make_session_paths(
            make_path(0, [1], [2]), make_path(1, [1, 2], [3], logprobs=False), make_path(2, [1, 2, 3], [4])
        )
    )
    assert runs(made) == [["s-x0", "s-x2"], ["s-x1"]]
    assert [trace.logprobs is None for trace in made.traces] == [False, True]


def test_rewards_of_turns_go_with_the_traces_that_train_them() -> None:
    turns = make_session_paths(
        make_path(0, [1], [2], reward=0.25),
        make_path(1, [5], [6], reward=0.75),
        make_path(2, [1, 2], [3]),
        reward=None,
        reason="lost",
    )
    made = prefix_merging(turns)
    assert [trace.turn_rewards for trace in made.traces] == [{"s-x0": 0.25}, {"s-x1": 0.75}]
    assert [(trace.reward, trace.reason) for trace in made.traces] == [(None, "lost")] * 2
    (told,) = prefix_tree([turns]).sessions
    assert (told.reward, told.reason, told.turn_rewards) == (None, "lost", {"s-x0": 0.25, "s-x1": 0.75})


def test_a_groups_tree_has_the_shared_prompt_once() -> None:
    one = make_session_paths(make_path(0, [1, 2, 3], [4], session_id="a"))
    other = make_session_paths(
        make_path(0, [1, 2, 3], [5, 6], session_id="b"), make_path(1, [1, 2, 3, 5, 6], [7], session_id="b")
    )
    tree = prefix_tree([one, other])
    assert tree.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert tree.depths.tolist() == [0, 3, 3]
    assert tree.starts.tolist() == [0, 3, 4, 7]
    assert [(term.session_id, term.node, term.weight) for term in tree.terms] == [
        ("a", 1, 1.0),
        ("b", 2, 2 / 3),
        ("b", 2, 1 / 3),
    ]


@pytest.mark.parametrize("build", TRACE_BUILDERS)
def test_a_session_that_trains_nothing(build: Callable[[SessionPaths], Trajectory]) -> None:
    for empty in (make_session_paths(), make_session_paths(make_path(0, [1], [2], trainable=0))):
        made = build(empty)
        assert (made.traces, made.tokens.computed, made.tokens.trainable) == ([], 0, 0)
        tree = prefix_tree([empty])
        assert (len(tree.ids), tree.starts.tolist(), tree.terms) == (0, [0], [])


def test_a_long_session_is_merged_without_recursion() -> None:
    turns = make_session_paths(*(make_path(seq, range(3 * seq + 1), [3 * seq + 1]) for seq in range(2_000)))
    (trace,) = prefix_merging(turns).traces
    assert isinstance(trace, Trace)
    assert len(trace.exchange_ids) == 2_000


def _with_experts(one: TokenPath, call: int, layers: int = 2) -> TokenPath:
    """Each number says which call told it, and of which token."""
    tokens = len(one.prompt) + len(one.sampled) - 1
    one.experts = np.repeat(100 * call + np.arange(tokens), layers * 2).reshape(tokens, layers, 2)
    return one


def test_experts_are_those_of_the_call_that_computed_a_token_first() -> None:
    first = _with_experts(make_path(0, [1, 2], [3, 4, 5], trainable=2), 1)  # 5 was never delivered
    second = _with_experts(make_path(1, [1, 2, 3, 4, 6], [7, 8]), 2)
    (merged,) = prefix_merging(make_session_paths(first, second)).traces
    assert merged.experts is not None
    assert merged.experts[:, 0, 0].tolist() == [100, 101, 102, 203, 204, 205]
    assert merged.experts.shape == (len(merged.prompt_ids) + len(merged.response_ids) - 1, 2, 2)
    alone = per_request(make_session_paths(first, second)).traces
    assert [trace.experts[:, 1, 1].tolist() for trace in alone if trace.experts is not None] == [
        [100, 101, 102],
        [200, 201, 202, 203, 204, 205],
    ]


def test_experts_that_not_all_calls_tell_are_left_out() -> None:
    first, second = make_path(0, [1, 2], [3, 4]), _with_experts(make_path(1, [1, 2, 3, 4, 6], [7, 8]), 2)
    (merged,) = prefix_merging(make_session_paths(first, second)).traces
    assert merged.experts is None
    _with_experts(first, 1, layers=3)  # of another model
    (merged,) = prefix_merging(make_session_paths(first, second)).traces
    assert merged.experts is None

"""Sessions as trainers and bridges receive them: sound ones pass, and whatever is changed on the way is held back."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given

from polar.bridges.rollouts import RolloutClient
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import ConversationBuilder, make_text_parts
from polar.testing.token_paths import make_path, make_session_paths, sampled_sessions
from polar.testing.token_paths import session_groups as sampled_groups
from polar.train import groups
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree
from polar.trajectory.checker import SessionChecker
from polar.trajectory.document_check import check_received, check_received_tree
from tests.unit.bridges.telling import result as told
from tests.unit.train import documents


@given(sampled_sessions())
def test_what_the_builders_make_of_a_session_passes(it: SessionPaths) -> None:
    for build in (per_request, prefix_merging):
        assert check_received(build(it)) == []


@given(sampled_groups())
def test_so_does_the_tree_of_a_group(sessions: list[SessionPaths]) -> None:
    assert check_received_tree(prefix_tree(sessions)) == []


Document = dict[str, Any]


def one(name: str, reward: float) -> SessionPaths:
    """Three turns, the last of which goes on from nothing; one token was never delivered."""
    return make_session_paths(
        make_path(0, [1, 2], [3, 4], session_id=name, scale=1.0),
        make_path(1, [1, 2, 3, 4, 5], [6, 7, 8], trainable=2, session_id=name, scale=1.0),
        make_path(2, [9], [len(name), 8], session_id=name, scale=1.0),
        reward=reward,
    )


# Mistakes in traces: of the first session's document


def shift_mask(traces: list[Document]) -> None:
    traces[0]["loss_mask"] = [0, *traces[0]["loss_mask"][:-1]]


def drop_token(traces: list[Document]) -> None:
    del traces[0]["response_ids"][0]


def double_trace(traces: list[Document]) -> None:
    traces.append(traces[0])


def lose_first_turn(traces: list[Document]) -> None:
    span = traces[0]["metadata"]["spans"][0]
    span["offset"] += 1


def change_weight(traces: list[Document]) -> None:
    traces[0]["weight"] *= 1.01


def spoil_logprob(traces: list[Document]) -> None:
    traces[0]["response_logprobs"][0] = 0.5


def sentinel_logprob(traces: list[Document]) -> None:
    traces[0]["response_logprobs"][0] = -9999.0


def logprob_of_context(traces: list[Document]) -> None:
    traces[0]["response_logprobs"][2] = -1.0


def unknown_version(traces: list[Document]) -> None:
    traces[0]["policy_versions"][0] = -1


def version_of_context(traces: list[Document]) -> None:
    traces[0]["policy_versions"][2] = 3


def negative_id(traces: list[Document]) -> None:
    traces[0]["prompt_ids"][0] = -4


def swap_exchanges(traces: list[Document]) -> None:
    traces[0]["exchange_ids"].reverse()


def change_reward(traces: list[Document]) -> None:
    traces[0]["reward"] = 0.5


def lose_trace(traces: list[Document]) -> None:
    traces.pop()


TRACE_MISTAKES = [
    shift_mask,
    drop_token,
    double_trace,
    lose_first_turn,
    change_weight,
    spoil_logprob,
    sentinel_logprob,
    logprob_of_context,
    unknown_version,
    version_of_context,
    negative_id,
    swap_exchanges,
    change_reward,
    lose_trace,
]


@pytest.mark.parametrize("mistake", TRACE_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_trainer_leaves_out_a_session_with_a_mistake(mistake: Callable[[list[Document]], None]) -> None:
    data = msgspec.json.decode(documents.feed([one("a", 0.0), one("bb", 1.0)], "prefix_merging"))
    mistake(data["results"][0]["trajectory"]["traces"])
    spoiled = msgspec.json.encode(data)
    group = groups.build_group_from_traces(spoiled, 0)
    held, sound = group.members
    assert (held.reward, held.reason, held.trained_tokens) == (None, "verify_failed", 0)
    assert (sound.reward, sound.reason, sound.trained_tokens) == (1.0, None, 6)
    assert group.verified_sessions == 2
    assert group.trainable_indices == [1]


def test_a_share_of_nothing_leaves_nothing_out() -> None:
    data = msgspec.json.decode(documents.feed([one("a", 0.0), one("bb", 1.0)], "prefix_merging"))
    change_weight(data["results"][0]["trajectory"]["traces"])
    group = groups.build_group_from_traces(msgspec.json.encode(data), 0, SessionChecker(share=0))
    assert ([member.reason for member in group.members], group.verified_sessions) == ([None, None], 0)


def test_a_wrong_token_is_named_with_its_own_value() -> None:
    made = prefix_merging(make_session_paths(make_path(0, [1, -2], [3, -7])))
    (problem,) = [problem for problem in check_received(made) if problem.kind == "ids"]
    assert problem.message == "trace 0: token 1 is -2, which no token is"


# Mistakes in trees


def term_of(tree: Document, session_id: str = "a") -> Document:
    found: Document = next(term for term in tree["terms"] if term["session_id"] == session_id)
    return found


def term_of_another_place(tree: Document) -> None:
    term_of(tree)["offset"] += 1


def term_too_long(tree: Document) -> None:
    term_of(tree)["stop"] += 100


def term_twice(tree: Document) -> None:
    tree["terms"].append(term_of(tree))
    tree["tokens"]["trainable"] += term_of(tree)["stop"] - term_of(tree)["start"]


def term_weight(tree: Document) -> None:
    term_of(tree)["weight"] *= 1.01


def term_logprob(tree: Document) -> None:
    term_of(tree)["logprobs"][0] = 1.0


def term_version(tree: Document) -> None:
    term_of(tree)["policy_versions"][0] = -1


TERM_MISTAKES = [term_of_another_place, term_too_long, term_twice, term_weight, term_logprob, term_version]


def wrong_depth(tree: Document) -> None:
    tree["nodes"][-1]["depth"] += 1


def wrong_parent(tree: Document) -> None:
    tree["nodes"][-1]["parent"] = len(tree["nodes"])


def wrong_count(tree: Document) -> None:
    tree["tokens"]["trainable"] -= 1


def wrong_id(tree: Document) -> None:
    tree["nodes"][0]["ids"][0] = -1


TREE_MISTAKES = [wrong_depth, wrong_parent, wrong_count, wrong_id]


def group_of(mistake: Callable[[Document], None]) -> groups.RolloutGroup:
    sessions = [one("a", 0.0), one("bb", 1.0)]
    tree = documents.tree(sessions)
    mistake(tree)
    return groups.build_group_from_tree(documents.feed(sessions, "prefix_tree"), tree, 0)


@pytest.mark.parametrize("mistake", TERM_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_of_a_tree_only_the_session_is_left_out_whose_terms_are_wrong(mistake: Callable[[Document], None]) -> None:
    group = group_of(mistake)
    held, sound = group.members
    assert (held.reward, held.reason, held.trained_tokens) == (None, "verify_failed", 0)
    if mistake is not term_too_long:  # which is counted, too
        assert (sound.reward, sound.reason, sound.trained_tokens) == (1.0, None, 6)


@pytest.mark.parametrize("mistake", TREE_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_tree_that_is_wrong_as_a_whole_is_left_out_whole(mistake: Callable[[Document], None]) -> None:
    group = group_of(mistake)
    assert [(member.reward, member.reason) for member in group.members] == [(None, "verify_failed")] * 2
    assert group.trees == []


def test_what_the_service_held_back_when_it_made_the_tree_is_not_trained_on() -> None:
    sessions = [one("a", 0.0), one("bb", 1.0)]
    tree = documents.tree([sessions[1]])
    tree["sessions"].append({"session_id": "a", "reward": None, "reason": "verify_failed", "turn_rewards": {}})
    group = groups.build_group_from_tree(documents.feed(sessions, "prefix_tree"), tree, 0)
    assert [(member.reward, member.reason) for member in group.members] == [(None, "verify_failed"), (1.0, None)]


# Bridges


def spoil_mask(result: Document) -> None:
    result["trajectory"]["traces"][0]["loss_mask"][0] ^= 1


def spoil_version(result: Document) -> None:
    result["trajectory"]["traces"][0]["policy_versions"][0] = -1


def leave_out_weight(result: Document) -> None:
    del result["trajectory"]["traces"][0]["weight"]


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [(spoil_mask, "verify_failed"), (spoil_version, "verify_failed"), (leave_out_weight, "verify_error")],
)
def test_bridges_leave_out_a_session_with_a_mistake(mistake: Callable[[Document], None], reason: str) -> None:
    results = []
    for name in ("a", "b"):
        talk = ConversationBuilder(name)
        talk.add_call([{"role": "user", "content": "List the files."}], make_text_parts("None."))
        results.append(told(talk.build_item(task_id="t")).model_dump())
    mistake(results[0])
    rollouts = RolloutClient.__new__(RolloutClient)
    rollouts._checker = SessionChecker()
    asked = TaskRequest.model_validate({"task_id": "t", "instruction": "do it", "num_samples": 2})
    group = rollouts._build_group("t", asked, [SessionResult.model_validate(result) for result in results])
    assert [item.session.session_id for item in group.items] == ["b"]
    assert group.left_out == {reason: 1}

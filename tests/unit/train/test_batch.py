"""From what the service tells of a group to a gradient: the same, however its sessions were split."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.records.trajectory import SessionPaths
from polar.testing.token_paths import make_path, make_session_paths
from polar.testing.token_paths import session_groups as sampled_groups
from polar.train.batch import Batch, TrainingGroup, mark_stale_sessions, select_training_sessions
from polar.train.groups import TokenColumns, prune_tree
from polar.train.learner import UpdateLoss
from polar.train.packing import pack_trees
from polar.train.settings import GrpoSettings
from polar.train.tree_model import SequentialModel, TreeModel
from tests.unit.train import tiny
from tests.unit.train.documents import BUILDERS, group

MODEL = tiny.model(vocab_size=16).double()
GRPO = GrpoSettings(filter=False, kl=0.1)


def scaled(sessions: list[SessionPaths]) -> list[SessionPaths]:
    """Every call at a temperature of its own."""
    for one in sessions:
        for call in one.paths:
            call.scale = 0.7 + 0.1 * call.seq
    return sessions


def keyed(columns: TokenColumns) -> list[tuple[float, ...]]:
    """Entries in an order that doesn't depend on how they were split."""
    return sorted(zip(*(getattr(columns, name).tolist() for name in columns.__struct_fields__), strict=True))


def gradient(model: Any, one: TrainingGroup) -> tuple[torch.Tensor, float]:
    MODEL.zero_grad()
    batch = Batch.from_groups([one], "session")
    initial = torch.full((len(batch),), -2.0)
    update = UpdateLoss(batch, GRPO, torch.device("cpu"), None, initial)
    model.backward(batch.packed, update.compute_loss)
    found = torch.cat([parameter.grad.flatten() for parameter in MODEL.parameters() if parameter.grad is not None])
    return found, update.total


@settings(max_examples=40, deadline=None)
@given(sampled_groups(), st.booleans())
def test_splitting_a_session_changes_nothing(sessions: list[SessionPaths], scale: bool) -> None:
    """Loss and gradient, under every builder; with rewards of turns as well."""
    options = GRPO.model_copy(update={"scale": scale})
    found = {builder: select_training_sessions(group(scaled(sessions), builder), options) for builder in BUILDERS}
    kept = {builder: one for builder, one in found.items() if isinstance(one, TrainingGroup)}
    assert len(kept) in (0, len(BUILDERS))
    if not kept:
        return
    columns = {builder: keyed(one.columns) for builder, one in kept.items()}
    for builder in BUILDERS:
        np.testing.assert_allclose(columns[builder], columns["prefix_tree"], rtol=1e-6)
    MODEL.set_attn_implementation("eager")
    expected, loss = gradient(SequentialModel(MODEL), kept["per_request"])
    for builder in BUILDERS:
        own, total = gradient(TreeModel(MODEL), kept[builder])
        assert total == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert float((own - expected).norm()) <= 2e-6 * float(expected.norm()) + 1e-8


def pair(**changes: Any) -> list[SessionPaths]:
    """Two sessions that share a prompt; the second has two turns."""
    first = make_session_paths(make_path(0, [1, 2], [3, 4], session_id="a", scale=1.0), reward=1.0)
    calls = [
        make_path(0, [1, 2], [3, 5], session_id="b", scale=1.0),
        make_path(1, [1, 2, 3, 5, 6], [7], session_id="b", scale=1.0),
    ]
    return [first, SessionPaths("b", calls, **({"reward": 0.0} | changes))]


@pytest.mark.parametrize("builder", BUILDERS)
def test_weights_are_of_sessions(builder: str) -> None:
    found = select_training_sessions(group(pair(), builder), GRPO)
    assert isinstance(found, TrainingGroup)
    batch = Batch.from_groups([found], "session")
    by_session = {number: batch.weight[batch.columns.session == number] for number in (0, 1)}
    assert by_session[0].tolist() == pytest.approx([1 / 4] * 2)
    assert by_session[1].tolist() == pytest.approx([1 / 6] * 3)
    assert Batch.from_groups([found], "token").weight.tolist() == pytest.approx([1 / 5] * 5)


@pytest.mark.parametrize("builder", BUILDERS)
def test_sessions_without_a_reward_are_not_trained(builder: str) -> None:
    third = make_session_paths(
        make_path(0, [1, 2], [9], session_id="c", scale=1.0), reward=None, reason="engine_failed"
    )
    found = select_training_sessions(group([*pair(), third], builder), GRPO)
    assert isinstance(found, TrainingGroup)
    assert found.sessions == ["a", "b"]
    assert 9 not in np.concatenate([tree.ids for tree in found.trees])  # nor computed


def test_groups_without_a_signal_are_left_out() -> None:
    options = GRPO.model_copy(update={"filter": True})
    assert select_training_sessions(group(pair(reward=1.0)), options) == "no_signal"
    assert select_training_sessions(group(pair(reward=None, reason="stale")), options) == "too_few"
    assert isinstance(select_training_sessions(group(pair()), options), TrainingGroup)


def test_a_reward_of_a_turn_is_a_signal() -> None:
    sessions = pair(reward=1.0)
    sessions[1].paths[1].reward = 0.5
    found = select_training_sessions(group(sessions), GRPO.model_copy(update={"filter": True, "scale": False}))
    assert isinstance(found, TrainingGroup)
    entries = zip(found.columns.session.tolist(), found.columns.turn.tolist(), found.advantage.tolist(), strict=True)
    assert set(entries) == {(0, 0, -0.25), (1, 0, 0.25), (1, 1, 0.25)}


def test_stale_sessions_are_marked_whole() -> None:
    found = group(pair())  # versions are 0 for the first calls, and 1 for the second one
    mark_stale_sessions(found, lambda version: 3 - version, 2)
    assert [member.reason for member in found.members] == ["stale", "stale"]
    found = group(pair())
    found.trees[0].columns.version[found.trees[0].columns.session == 0] = 3
    mark_stale_sessions(found, lambda version: 3 - version, 2)
    assert [member.reason for member in found.members] == [None, "stale"]


def test_what_nobody_knows_the_temperature_of_is_not_trained() -> None:
    sessions = pair()
    sessions[1].paths[1].scale = None
    for builder in BUILDERS:
        found = group(sessions, builder)
        assert found.excluded_tokens["sampling_unknown"] == 1
        assert sum(len(part.tree.tokens) for part in found.trees) == 4


@settings(max_examples=60, deadline=None)
@given(sampled_groups(), st.data())
def test_what_is_cut_off_is_not_needed(sessions: list[SessionPaths], data: st.DataObject) -> None:
    """Log-probabilities of what is left don't change, and every leaf is needed."""
    whole = group(scaled(sessions))
    model = TreeModel(MODEL)
    for part in whole.trees:
        kept = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(part.tree.tokens), max_size=len(part.tree.tokens)))
        )
        cut = prune_tree(part, kept)
        if cut is None:
            assert not kept.any()
            continue
        before, after = model.compute_logprobs(pack_trees([part.tree])), model.compute_logprobs(pack_trees([cut.tree]))
        torch.testing.assert_close(after, before[torch.from_numpy(kept)], rtol=1e-5, atol=1e-6)
        leaves = set(range(len(cut.tree.parents))) - set(cut.tree.parents.tolist())
        assert {int(cut.tree.starts[leaf + 1]) - 1 for leaf in leaves} <= set(cut.tree.tokens.tolist())

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.records.trajectory import ROOT
from polar.train import packing
from polar.train.packing import MemoryBudget, PackedTrees, TokenTree, pack_trees, split_into_chunks
from tests.unit.train.trees import before, trees


@pytest.fixture(params=["as they are", "parted"])
def parting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trees are small here: what counts as tiny, and as long, has to be so as well."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "parted":
            patch.setattr(packing, "_TINY_NODE_TOKENS", 5)
            patch.setattr(packing, "_LONG_BRANCH_TOKENS", 3)
            patch.setattr(packing, "_LONG_LEAF_TOKENS", 4)
        yield


@pytest.mark.usefixtures("parting")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it is the same for all examples
@given(st.lists(trees(), max_size=3))
def test_every_path_is_there_and_sees_itself_alone(given: list[TokenTree]) -> None:
    packed = pack_trees(given)
    asked = [
        (tree, int(token), float(heat))
        for tree in given
        for token, heat in zip(tree.tokens, tree.temperature, strict=True)
    ]
    assert sorted(packed.terms.entry_indices.tolist()) == list(range(len(asked)))
    assert (np.diff(packed.terms.positions) >= 0).all()
    for at, target, heat, source in zip(
        packed.terms.positions, packed.terms.target, packed.terms.temperature, packed.terms.entry_indices, strict=True
    ):
        tree, token, temperature = asked[source]
        path = [int(at)]
        while packed.before[path[0]] != ROOT:
            path.insert(0, int(packed.before[path[0]]))
        assert packed.ids[path].tolist() == tree.ids[before(tree, token)].tolist()
        assert packed.depths[path].tolist() == list(range(len(path)))
        assert (int(target), float(heat)) == (int(tree.ids[token]), temperature)
        seen = [key for key in range(int(at) + 1) if at < packed.subtree_ends[key]]
        assert seen == path


@given(st.lists(trees(), max_size=3), st.integers(1, 40), st.integers(0, 60))
def test_chunks_hold_all_tokens_once_and_know_their_context(given: list[TokenTree], most: int, budget: int) -> None:
    packed = pack_trees(given)
    chunks = split_into_chunks(packed, most, MemoryBudget(budget))
    assert [token for chunk in chunks for token in range(chunk.start, chunk.stop)] == list(range(len(packed)))
    waiting = []
    for chunk in chunks:
        assert len(chunk) <= most
        context = [token for start, stop in chunk.context for token in range(start, stop)]
        assert context == [key for key in range(chunk.start) if packed.subtree_ends[key] > chunk.start]
        assert chunk.context_length == packed.depths[chunk.start]
        whole = all(
            (key <= query < packed.subtree_ends[key]) == (key <= query)
            for query in range(chunk.start, chunk.stop)
            for key in [*context, *range(chunk.start, chunk.stop)]
        )
        assert chunk.needs_no_mask == whole
        assert chunk.fully_visible_tokens == sum(packed.subtree_ends[key] >= chunk.stop for key in context)
        assert all(packed.subtree_ends[key] >= chunk.stop for key in context[: chunk.fully_visible_tokens])
        waiting.append(chunk)
        kept = 0
        for one in reversed(waiting):
            kept += len(one) if one.keeps_activations else 0
        assert kept <= budget
        waiting = [one for one in waiting if one.last_use > chunk.stop]


def _drawn(lengths: list[int], parents: list[int]) -> PackedTrees:
    starts = np.cumsum([0, *lengths])
    nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    return pack_trees([TokenTree(np.zeros(starts[-1], np.int32), starts, np.array(parents, np.int32), *nothing)])


def test_what_fits_is_kept() -> None:
    packed = _drawn([8, 16, 16], [ROOT, 0, 0])

    def kept(budget: int) -> list[tuple[int, bool]]:
        return [(chunk.start, chunk.keeps_activations) for chunk in split_into_chunks(packed, 16, MemoryBudget(budget))]

    assert kept(24) == [(0, True), (8, True), (24, True)]
    assert kept(23) == [(0, False), (8, True), (24, True)]
    assert kept(15) == [(0, False), (8, False), (24, False)]


def test_of_a_long_trunk_some_is_kept() -> None:
    packed = _drawn([32, 32, 32], [ROOT, 0, 0])
    chunks = split_into_chunks(packed, 32, MemoryBudget(48))
    assert [(chunk.start, chunk.stop, chunk.keeps_activations) for chunk in chunks] == [
        (0, 16, False), (16, 32, True), (32, 64, True), (64, 96, True),
    ]  # fmt: skip


def test_what_branches_often_is_cut_where_its_subtrees_end() -> None:
    """Sessions that hang off a trunk, each with a leaf at every turn: none waits for another one."""
    lengths, parents = [20], [ROOT]
    for _session in range(4):
        lengths.append(3)
        parents.append(0)
        for _turn in range(5):
            spine = len(lengths) - 1
            lengths += [2, 3]
            parents += [spine, spine]
    chunks = split_into_chunks(_drawn(lengths, parents), 40, MemoryBudget(1000))
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 20), (20, 48), (48, 76), (76, 104), (104, 132)]
    assert all(chunk.last_use == chunk.stop for chunk in chunks[1:])


def test_few_tokens_before_a_branching_go_with_the_trunk() -> None:
    """Replies that begin alike: two of three share a token, and stand right behind the trunk with it."""
    packed = _drawn([64, 1, 50, 40, 60], [ROOT, 0, 1, 1, 0])
    chunks = split_into_chunks(packed, 128, MemoryBudget(1000))
    assert [(chunk.start, chunk.stop, chunk.last_use) for chunk in chunks] == [
        (0, 65, 215), (65, 115, 115), (115, 155, 155), (155, 215, 215),
    ]  # fmt: skip


def test_a_few_tokens_are_a_chunk_where_others_would_wait_with_them() -> None:
    """There are three such beginnings, and one trunk. With memory for all it is cheaper to wait."""
    packed = _drawn([64, 1, 50, 40, 1, 60, 60, 1, 60, 60], [ROOT, 0, 1, 1, 0, 4, 4, 0, 7, 7])
    roomy, narrow = (
        [len(chunk) for chunk in split_into_chunks(packed, 64, MemoryBudget(budget))] for budget in (1000, 62)
    )
    assert 61 in roomy
    assert 61 not in narrow
    assert 1 in narrow


def test_words_that_long_replies_begin_with_are_computed_in_each_of_them() -> None:
    """By themselves they would take as long as a thousand tokens, or have one reply wait for the other."""
    long, tiny = packing._LONG_BRANCH_TOKENS, packing._TINY_NODE_TOKENS
    lengths = [long, tiny, long, long]
    packed = _drawn(lengths, [ROOT, 0, 1, 1])
    assert len(packed) == sum(lengths) + tiny
    assert packed.before[[long, 2 * long + tiny]].tolist() == [long - 1, long - 1]
    for others in ([long, tiny + 1, long, long], [long, tiny, long, long - 1]):
        assert len(_drawn(others, [ROOT, 0, 1, 1])) == sum(others)
    assert len(_drawn([long, tiny, 2 * long], [ROOT, 0, 1])) == 3 * long + tiny  # there is nothing to part


def test_such_words_may_follow_upon_each_other() -> None:
    long, tiny = packing._LONG_BRANCH_TOKENS, packing._TINY_NODE_TOKENS
    parents = [ROOT, 0, 1, 1, 2, 2]
    lengths = [long, 2, 1, long, long, long]
    assert len(_drawn(lengths, parents)) == sum(lengths) + 2 * 2 + 1
    assert len(_drawn([long, 2, tiny, long, long, long], parents)) == 4 * long + tiny + 2 * 2


def test_no_reply_has_more_than_a_few_of_such_words_again() -> None:
    """However many nodes stand above each other: with one child each, as where sessions were dropped, or with two."""
    long, tiny = packing._LONG_BRANCH_TOKENS, packing._TINY_NODE_TOKENS
    links = 100
    one_child = [long] + [3] * links + [long, long]
    assert len(_drawn(one_child, [ROOT, *range(links + 1), links])) - sum(one_child) <= 2 * tiny
    lengths, parents = [long], [ROOT]
    for link in range(links):  # each a tiny node with a long end, and the next one
        parents += [max(0, 2 * link - 1), 2 * link + 1]
        lengths += [3, long]
    assert 0 < len(_drawn(lengths, parents)) - sum(lengths) <= tiny * (links + 1)


def test_a_short_beginning_goes_with_the_shortest_end() -> None:
    """All others come behind them, while both wait."""
    long = packing._LONG_LEAF_TOKENS
    packed = _drawn([long // 2, 7 * long, 6 * long, 8 * long], [ROOT, 0, 0, 0])
    roomy, narrow = (
        [len(chunk) for chunk in split_into_chunks(packed, 8 * long, MemoryBudget(kept))]
        for kept in (15 * long, 14 * long)
    )
    assert roomy == [long // 2 + 6 * long, 7 * long, 8 * long]
    assert narrow == [long // 2, 6 * long, 7 * long, 8 * long]  # together they would go through twice


def test_a_token_without_anything_before_it_is_refused() -> None:
    tree = TokenTree(
        np.zeros(3, np.int32), np.array([0, 3]), np.array([ROOT], np.int32), np.array([0]), np.ones(1, np.float32)
    )
    with pytest.raises(ValueError, match="nothing predicts it"):
        pack_trees([tree])

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.train.cutting import cut
from polar.train.forest import Tree, forest
from polar.trajectory.tree import ROOT
from tests.unit.train.trees import before, trees


@given(st.lists(trees(), max_size=3))
def test_every_path_is_there_and_sees_itself_alone(given: list[Tree]) -> None:
    packed = forest(given)
    asked = [
        (tree, int(token), float(heat))
        for tree in given
        for token, heat in zip(tree.tokens, tree.temperature, strict=True)
    ]
    assert sorted(packed.terms.source.tolist()) == list(range(len(asked)))
    assert (np.diff(packed.terms.at) >= 0).all()
    for at, target, heat, source in zip(
        packed.terms.at, packed.terms.target, packed.terms.temperature, packed.terms.source, strict=True
    ):
        tree, token, temperature = asked[source]
        path = [int(at)]
        while packed.before[path[0]] != ROOT:
            path.insert(0, int(packed.before[path[0]]))
        assert packed.ids[path].tolist() == tree.ids[before(tree, token)].tolist()
        assert packed.depths[path].tolist() == list(range(len(path)))
        assert (int(target), float(heat)) == (int(tree.ids[token]), temperature)
        seen = [key for key in range(int(at) + 1) if at < packed.ends[key]]
        assert seen == path


@given(st.lists(trees(), max_size=3), st.integers(1, 40), st.integers(0, 60))
def test_chunks_hold_all_tokens_once_and_know_their_context(given: list[Tree], most: int, budget: int) -> None:
    packed = forest(given)
    chunks = cut(packed, most, budget)
    assert [token for chunk in chunks for token in range(chunk.start, chunk.stop)] == list(range(len(packed)))
    waiting = []
    for chunk in chunks:
        assert len(chunk) <= most
        context = [token for start, stop in chunk.context for token in range(start, stop)]
        assert context == [key for key in range(chunk.start) if packed.ends[key] > chunk.start]
        assert chunk.depth == packed.depths[chunk.start]
        whole = all(
            (key <= query < packed.ends[key]) == (key <= query)
            for query in range(chunk.start, chunk.stop)
            for key in [*context, *range(chunk.start, chunk.stop)]
        )
        assert chunk.plain == whole
        assert chunk.whole == sum(packed.ends[key] >= chunk.stop for key in context)
        assert all(packed.ends[key] >= chunk.stop for key in context[: chunk.whole])
        waiting.append(chunk)
        kept = 0
        for one in reversed(waiting):
            kept += len(one) if one.kept else 0
        assert kept <= budget
        waiting = [one for one in waiting if one.needed > chunk.stop]


def test_what_fits_is_kept() -> None:
    tree = Tree(
        np.zeros(30, np.int32),
        np.array([0, 10, 20, 30]),
        np.array([ROOT, 0, 0], np.int32),
        np.empty(0, np.int64),
        np.empty(0, np.float32),
    )
    packed = forest([tree])
    assert [(chunk.start, chunk.kept) for chunk in cut(packed, 10, 20)] == [(0, True), (10, True), (20, True)]
    assert [(chunk.start, chunk.kept) for chunk in cut(packed, 10, 19)] == [(0, False), (10, True), (20, True)]
    assert [(chunk.start, chunk.kept) for chunk in cut(packed, 5, 10)] == [
        (0, False), (5, False), (10, True), (15, True), (20, True), (25, True),
    ]  # fmt: skip


def test_a_token_without_anything_before_it_is_refused() -> None:
    tree = Tree(
        np.zeros(3, np.int32), np.array([0, 3]), np.array([ROOT], np.int32), np.array([0]), np.ones(1, np.float32)
    )
    with pytest.raises(ValueError, match="nothing predicts it"):
        forest([tree])

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar.records.trajectory import ROOT, Image, SessionPaths
from polar.testing.token_paths import PLACEHOLDER, list_symbols, make_path, sampled_sessions, session_groups
from polar.trajectory.tree import TokenTree, build_token_tree


def shown(tree: TokenTree) -> list[tuple[int, int, list[int]]]:
    return [(node.parent, node.start, tree.get_ids(number).tolist()) for number, node in enumerate(tree.nodes)]


def test_turns_that_extend_one_another_are_one_node() -> None:
    tree = build_token_tree(
        [make_path(0, [1, 2], [3]), make_path(1, [1, 2, 3, 4], [5]), make_path(2, [1, 2, 3, 4, 5], [6])]
    )
    assert shown(tree) == [(ROOT, 0, [1, 2, 3, 4, 5, 6])]
    assert tree.ends == [0, 0, 0]
    assert [(it.start, it.stop, it.offset) for index in range(3) for it in tree.list_sampled_spans(index)] == [
        (2, 3, 0),
        (4, 5, 0),
        (5, 6, 0),
    ]


def test_a_node_ends_where_paths_part() -> None:
    tree = build_token_tree([make_path(0, [1, 2], [3, 4]), make_path(1, [1, 2], [3, 5]), make_path(2, [1, 7], [])])
    assert shown(tree) == [(ROOT, 0, [1]), (0, 1, [2, 3]), (1, 3, [4]), (1, 3, [5]), (0, 1, [7])]
    assert tree.ends == [2, 3, 4]
    assert [(it.node, it.start, it.stop, it.offset) for it in tree.list_sampled_spans(1)] == [
        (1, 1, 2, 0),
        (3, 0, 1, 1),
    ]


def test_there_may_be_several_roots_and_none() -> None:
    assert shown(build_token_tree([make_path(0, [5], []), make_path(1, [4], [])])) == [(ROOT, 0, [4]), (ROOT, 0, [5])]
    empty = build_token_tree([make_path(0, [], [])])
    assert (empty.nodes, empty.ends, empty.num_tokens, empty.list_sampled_spans(0)) == ([], [ROOT], 0, [])
    assert build_token_tree([]).nodes == []


def test_ids_are_views_on_the_paths_own_arrays() -> None:
    long, other = make_path(0, range(100), range(100, 200)), make_path(1, [*range(50), 7], [])
    tree = build_token_tree([long, other])
    upper, _, lower = (tree.get_ids(number) for number in range(3))
    assert np.shares_memory(upper, long.prompt) or np.shares_memory(upper, other.prompt)
    assert lower.tolist() == list(range(50, 200))  # in both of a path's arrays: the one case that is copied


def test_images_part_paths_where_they_differ() -> None:
    prompt = [1, PLACEHOLDER, PLACEHOLDER, 2]
    cat, dog = [Image(1, b"cat")], [Image(1, b"dog")]
    tree = build_token_tree([make_path(0, prompt, [3], images=cat), make_path(1, prompt, [3], images=dog)])
    rest = [PLACEHOLDER, PLACEHOLDER, 2, 3]
    assert shown(tree) == [(ROOT, 0, [1]), (0, 1, rest), (0, 1, rest)]
    assert (
        len(build_token_tree([make_path(0, prompt, [3], images=cat), make_path(1, prompt, [4], images=cat)]).nodes) == 3
    )
    assert len(build_token_tree([make_path(0, prompt, [3], images=cat), make_path(1, prompt, [3])]).nodes) == 3
    assert tree.paths[0].prompt.tolist() == prompt  # untouched


def test_the_same_image_behind_another_placeholder_is_another() -> None:
    tree = build_token_tree(
        [make_path(0, [8], [], images=[Image(0, b"cat")]), make_path(1, [9], [], images=[Image(0, b"cat")])]
    )
    assert shown(tree) == [(ROOT, 0, [8]), (ROOT, 0, [9])]


def test_two_images_at_one_place_are_both_looked_at() -> None:
    one = make_path(0, [9], [], images=[Image(0, b"cat"), Image(0, b"dog")])
    other = make_path(1, [9], [], images=[Image(0, b"cat"), Image(0, b"cow")])
    assert len(build_token_tree([one, other]).nodes) == 2


def test_differences_are_found_wherever_they_are() -> None:
    """Around the sizes of the blocks in which arrays are compared, and across the end of a prompt."""
    whole = np.random.default_rng(1).integers(0, 150_000, 100_000, dtype=np.int32)
    for at in (0, 1, 255, 256, 257, 1279, 1280, 33_000, 99_998, 99_999):
        changed = whole.copy()
        changed[at] += 1
        tree = build_token_tree(
            [make_path(0, whole[:70_000], whole[70_000:]), make_path(1, changed[:256], changed[256:])]
        )
        assert sorted(node.start for node in tree.nodes) == ([0, 0] if at == 0 else [0, at, at])


def test_many_siblings_and_a_deep_comb() -> None:
    """Thousands of nodes at one place, and thousands below one another."""
    siblings = build_token_tree([make_path(number, [1, 2, 3], [number]) for number in range(3_000)])
    assert len(siblings.nodes) == 3_001
    spine = np.full(3_000, 1, np.int32)
    comb = [make_path(number, spine[:number], [2]) for number in range(3_000)]
    random.Random(0).shuffle(comb)
    tree = build_token_tree(comb)
    assert tree.num_tokens == 2_999 + 3_000
    assert max(node.start for node in tree.nodes) == 2_998  # the last two part there
    assert len(tree.nodes) == 2_999 + 3_000 - 1


@given(session_groups(), st.randoms())
def test_each_prefix_is_there_once_and_each_path_whole(sessions: list[SessionPaths], order: random.Random) -> None:
    paths = [it for session in sessions for it in session.paths]
    for it in paths:
        it.num_trainable = len(it.sampled)  # so that `symbols` are all of its tokens
    seen = [list_symbols(it) for it in paths]
    tree = build_token_tree(paths)
    assert tree.num_tokens == len({line[:length] for line in seen for length in range(1, len(line) + 1)})
    for index, (it, line) in enumerate(zip(paths, seen, strict=True)):
        number = tree.ends[index]
        ids = tree.get_ids(number).tolist()[: len(line) - tree.nodes[number].start] if line else []
        while number != ROOT and (number := tree.nodes[number].parent) != ROOT:
            ids = tree.get_ids(number).tolist() + ids
        assert ids == [token for token, _ in line]
        found = [
            tree.get_ids(stretch.node)[stretch.start : stretch.stop].tolist()
            for stretch in tree.list_sampled_spans(index)
        ]
        assert [token for piece in found for token in piece] == it.sampled.tolist()
    order.shuffle(paths)
    assert shown(build_token_tree(paths)) == shown(tree)


@given(sampled_sessions())
def test_nodes_are_as_few_as_can_be(session: SessionPaths) -> None:
    """A parent has two children or more, which begin with different keys; so no two nodes could be one."""
    tree = build_token_tree(session.paths)
    children: dict[int, int] = {}
    for number, node in enumerate(tree.nodes):
        assert node.parent < number
        assert node.start < node.stop
        if node.parent != ROOT:
            assert tree.nodes[node.parent].stop == node.start
            children[node.parent] = children.get(node.parent, 0) + 1
    assert all(count > 1 for count in children.values())

"""Trees of tokens, packed for one pass through a model.

A tree is a group's `prefix_tree`, or a single trace (a tree of one path). Packed depth first, a token's descendants are
the tokens right behind it, up to where its subtree ends: so one number a token says who sees whom (`Forest.ends`), and
no mask is ever written down.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.records.trajectory import ROOT

Ints = NDArray[np.int32]
Indices = NDArray[np.int64]
Floats = NDArray[np.float32]


_TINY_NODE_TOKENS, _LONG_BRANCH_TOKENS = 16, 1024
"""Tokens. Replies often begin with the same word or two. A node of so few, with long branches below it, would go
through the model by itself, which takes as long for one token as for thousands, or have one branch wait for others."""
_LONG_LEAF_TOKENS = 4096
"""Tokens of an end that goes through a large model by itself, or with few others."""
_NO_INDICES: Indices = np.empty(0, np.int64)


class TokenTree(Struct):
    """Node i's ids are `ids[starts[i]:starts[i + 1]]`, below node `parents[i]` (ROOT for none), which stands before it.

    What is asked for: the log-probabilities of the tokens at `tokens` (indices into `ids`), one entry for each sampling
    of a token, with logits divided by `temperature`."""

    ids: Ints
    starts: Indices
    parents: Ints
    tokens: Indices
    temperature: Floats


class Terms(Struct):
    """What is asked of the model: one entry for each (sample, trained token), in the order of `at`."""

    positions: Indices  # the packed token behind which it was sampled
    target: Ints  # its id
    temperature: Floats
    entry_indices: Indices  # its number among the entries of all trees, as they were given

    def __len__(self) -> int:
        return len(self.positions)


class Forest(Struct):
    """Trees, one behind the other. Arrays have one entry a token; `q` sees `k` iff `k <= q < ends[k]`."""

    ids: Ints
    depths: Ints  # its position on its path
    before: Ints  # the packed token before it on its path; ROOT at the first
    subtree_ends: Ints  # where its subtree ends
    terms: Terms

    def __len__(self) -> int:
        return len(self.ids)


def pack_forest(trees: Sequence[TokenTree]) -> Forest:
    """Of a node's children, those that branch are packed before ends: so what waits for others stands together, and the
    rest, which is done with at once, behind it. But long ends come first of all: see `_depth_first`."""
    packed = [_pack(_dissolve_tiny_nodes(tree)) for tree in trees]
    offsets = np.cumsum([0, *(len(one) for one in packed)])
    if offsets[-1] >= 2**31:
        raise ValueError(f"{offsets[-1]} tokens are too many for one pass: 2^31 - 1 at most.")
    entries = np.cumsum([0, *(len(one.terms) for one in packed)])
    before = [np.where(one.before == ROOT, ROOT, one.before + offset) for one, offset in _zip_offsets(packed, offsets)]
    terms = Terms(
        positions=_concatenate(
            [one.terms.positions + offset for one, offset in _zip_offsets(packed, offsets)], np.int64
        ),
        target=_concatenate([one.terms.target for one in packed], np.int32),
        temperature=_concatenate([one.terms.temperature for one in packed], np.float32),
        entry_indices=_concatenate(
            [one.terms.entry_indices + first for one, first in _zip_offsets(packed, entries)], np.int64
        ),
    )
    return Forest(
        ids=_concatenate([one.ids for one in packed], np.int32),
        depths=_concatenate([one.depths for one in packed], np.int32),
        before=_concatenate(before, np.int32),
        subtree_ends=_concatenate(
            [one.subtree_ends + offset for one, offset in _zip_offsets(packed, offsets)], np.int32
        ),
        terms=terms,
    )


def make_path_tree(ids: Ints, tokens: Indices, temperature: Floats) -> TokenTree:
    """A trace: one path."""
    return TokenTree(ids, np.array([0, len(ids)], np.int64), np.array([ROOT], np.int32), tokens, temperature)


def _dissolve_tiny_nodes(tree: TokenTree) -> TokenTree:
    """Without tiny nodes above long branches: these have their tokens again, and only the first is asked for them. No
    branch has more than a few tokens again, however many such nodes there are above each other."""
    tiny = _find_tiny_nodes(tree)
    if not tiny.any():
        return tree
    handed: dict[int, tuple[Indices, int]] = {}  # by tiny node: what its branches begin with, and below whom they are
    number: dict[int, int] = {}  # by node that stays
    nodes: list[Indices] = []
    parents: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        begin, below = handed.get(parent, (_NO_INDICES, number.get(parent, ROOT)))
        own = np.concatenate([begin, np.arange(tree.starts[node], tree.starts[node + 1])])
        if tiny[node] and len(own) <= _TINY_NODE_TOKENS:
            handed[node] = own, below
            continue
        number[node] = len(nodes)
        nodes.append(own)
        parents.append(below)
    origin = np.concatenate(nodes)
    where = np.empty(len(tree.ids), np.int64)
    where[origin[::-1]] = np.arange(len(origin))[::-1]  # the first is written last
    return TokenTree(
        ids=tree.ids[origin],
        starts=np.cumsum([0, *map(len, nodes)]).astype(np.int64),
        parents=np.array(parents, np.int32),
        tokens=where[tree.tokens],
        temperature=tree.temperature,
    )


def _find_tiny_nodes(tree: TokenTree) -> NDArray[np.bool_]:
    """Which nodes are, above two branches or more that are all long."""
    lengths = np.diff(tree.starts)
    below = tree.parents != ROOT
    above = tree.parents[below]
    children = np.bincount(above, minlength=len(lengths))
    shortest = np.full(len(lengths), _LONG_BRANCH_TOKENS, np.int64)
    np.minimum.at(shortest, above, _subtree_sizes(tree)[below])
    tiny: NDArray[np.bool_] = (
        (lengths > 0) & (lengths <= _TINY_NODE_TOKENS) & (children > 1) & (shortest >= _LONG_BRANCH_TOKENS)
    )
    return tiny


def _subtree_sizes(tree: TokenTree) -> Indices:
    """Of each node's subtree, in tokens."""
    sizes = np.diff(tree.starts).astype(np.int64)
    for node in range(len(sizes) - 1, -1, -1):
        parent = int(tree.parents[node])
        if parent != ROOT:
            sizes[parent] += sizes[node]
    return sizes


def _pack(tree: TokenTree) -> Forest:
    order, ends = _depth_first(tree)
    lengths = np.diff(tree.starts)
    first = np.zeros(len(lengths), np.int64)  # of each node, packed
    first[order] = np.cumsum(lengths[order]) - lengths[order]

    before = np.arange(-1, len(tree.ids) - 1, dtype=np.int64)
    depths = np.zeros(len(tree.ids), np.int64)
    last = np.full(len(lengths), ROOT, np.int64)  # the packed token that a node's children go on from
    below = np.zeros(len(lengths), np.int64)  # the depth of its children
    for node in order:
        parent = tree.parents[node]
        onto, depth = (ROOT, 0) if parent == ROOT else (last[parent], below[parent])
        start, length = first[node], lengths[node]
        if length:
            before[start] = onto
            depths[start : start + length] = np.arange(depth, depth + length)
        last[node] = start + length - 1 if length else onto
        below[node] = depth + length

    # where each packed token was
    origin = np.concatenate([np.arange(tree.starts[node], tree.starts[node + 1]) for node in order] or [np.empty(0)])
    origin = origin.astype(np.int64)
    where = np.empty(len(origin), np.int64)
    where[origin] = np.arange(len(origin))
    token = where[tree.tokens]
    at = before[token]
    if (at == ROOT).any():
        raise ValueError("A token without anything before it can't be trained: nothing predicts it.")
    sorted_ = np.argsort(at, kind="stable")
    terms = Terms(
        positions=at[sorted_],
        target=tree.ids[tree.tokens][sorted_].astype(np.int32),
        temperature=tree.temperature[sorted_].astype(np.float32),
        entry_indices=sorted_.astype(np.int64),
    )
    return Forest(
        ids=tree.ids[origin].astype(np.int32),
        depths=depths.astype(np.int32),
        before=before.astype(np.int32),
        subtree_ends=np.repeat(ends[order], lengths[order]).astype(np.int32),
        terms=terms,
    )


def _depth_first(tree: TokenTree) -> tuple[Indices, Indices]:
    """Nodes in packed order, and where the subtree of each ends."""
    count = len(tree.parents)
    sizes = _subtree_sizes(tree)
    paths = np.zeros(count, np.int64)  # that end below it
    children: list[list[int]] = [[] for _ in range(count)]
    roots: list[int] = []
    for node in range(count - 1, -1, -1):
        parent = int(tree.parents[node])
        paths[node] = max(1, paths[node])
        if parent == ROOT:
            roots.append(node)
        else:
            children[parent].append(node)
            paths[parent] += paths[node]

    def sort_key(node: int) -> tuple[int, int, int]:
        """The last comes first: long ends, the shortest of them first, since a short beginning goes through the model
        with what comes right behind it, and both wait for all the others; then what branches; then short ends."""
        size = int(sizes[node])
        if paths[node] > 1:
            return 1, size, -node
        return (2, -size, -node) if size >= _LONG_LEAF_TOKENS else (0, size, -node)

    order: list[int] = []
    ends = np.zeros(count, np.int64)
    at = 0
    stack = sorted(roots, key=sort_key)
    while stack:
        node = stack.pop()
        order.append(node)
        ends[node] = at + sizes[node]
        at += int(tree.starts[node + 1] - tree.starts[node])
        stack.extend(sorted(children[node], key=sort_key))
    return np.array(order, np.int64), ends


def _zip_offsets(packed: list[Forest], numbers: NDArray[np.int64]) -> Iterable[tuple[Forest, np.int64]]:
    return zip(packed, numbers[:-1], strict=True)


def _concatenate(arrays: list[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.empty(0, kind)

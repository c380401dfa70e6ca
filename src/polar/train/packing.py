"""Packs token trees for a model and splits them into chunks, which are computed one after the other.

    TokenTree ─► pack_trees ─► PackedTrees ─► Chunker.plan ─► Chunk, Chunk, ...

A tree is a group's `prefix_tree`, or a single trace (a tree of one path). Trees are packed depth first, so a token's
descendants directly follow it, up to the end of its subtree. One number per token (`PackedTrees.subtree_ends`)
therefore defines the attention mask, and no mask is stored.

A chunk is an interval of the packed tokens. Its context is the path to its first token, which was computed before and
whose keys and values are still in memory. In the backward pass a chunk's turn comes once all chunks that attend to it
are done; by then the gradients of its keys and values are complete. So the gradient is exact wherever the trees are
cut.

A chunk whose activations are kept is computed once. The others are recomputed in the backward pass, as in activation
checkpointing. Activations are kept for the ends of paths, for as many tokens as possible, because they are released
soon. How many are kept depends on everything in memory at the same time (`MemoryBudget`): the keys, values and
gradients of a long path leave less room for activations."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from polar.records.trajectory import ROOT
from polar.train.flash_attention import round_context_length

Ints = NDArray[np.int32]
Indices = NDArray[np.int64]
Floats = NDArray[np.float32]


_TINY_NODE_TOKENS, _LONG_BRANCH_TOKENS = 16, 1024
"""Replies often begin with the same word or two. A node of so few tokens with long branches below it would be computed
alone, which takes as long for one token as for thousands, or one branch would have to wait for the others."""
_LONG_LEAF_TOKENS = 4096
"""A leaf of at least this many tokens is computed alone or with few others."""
_NO_INDICES: Indices = np.empty(0, np.int64)
MIN_CHUNK_TOKENS = 256
"""Shorter chunks take about as long as this and free almost no memory."""


class TokenTree(Struct):
    """Node i's ids are `ids[starts[i]:starts[i + 1]]`, below node `parents[i]` (ROOT for none), which stands before it.

    The trained tokens are at `tokens` (indices into `ids`), one entry for each sampling of a token, with logits divided
    by `temperature`."""

    ids: Ints
    starts: Indices
    parents: Ints
    tokens: Indices
    temperature: Floats


class LossTerms(Struct):
    """The log-probabilities to compute: one entry for each sampling of a trained token, ordered by `positions`."""

    positions: Indices  # the packed token after which it was sampled
    target: Ints  # its id
    temperature: Floats
    entry_indices: Indices  # its index among the entries of all trees, in their original order

    def __len__(self) -> int:
        return len(self.positions)


class PackedTrees(Struct):
    """Packed trees. Arrays have one entry per token. Token `q` attends to `k` iff `k <= q < subtree_ends[k]`."""

    ids: Ints
    depths: Ints  # its position on its path
    before: Ints  # the packed token before it on its path; ROOT at the first
    subtree_ends: Ints  # where its subtree ends
    terms: LossTerms

    def __len__(self) -> int:
        return len(self.ids)


def pack_trees(trees: Sequence[TokenTree]) -> PackedTrees:
    """Packs trees depth first. Of a node's children, those that branch come before leaves: tokens that later chunks
    need stay together, and leaves, which nothing needs, follow. Long leaves come first of all: see
    `_order_depth_first`."""
    packed = [_pack_tree(_inline_tiny_nodes(tree)) for tree in trees]
    offsets = np.cumsum([0, *(len(packed_tree) for packed_tree in packed)])
    if offsets[-1] >= 2**31:
        raise ValueError(f"{offsets[-1]} tokens are too many for one pass: 2^31 - 1 at most.")
    entries = np.cumsum([0, *(len(packed_tree.terms) for packed_tree in packed)])
    before = [
        np.where(packed_tree.before == ROOT, ROOT, packed_tree.before + offset)
        for packed_tree, offset in _zip_offsets(packed, offsets)
    ]
    terms = LossTerms(
        positions=_concatenate(
            [packed_tree.terms.positions + offset for packed_tree, offset in _zip_offsets(packed, offsets)], np.int64
        ),
        target=_concatenate([packed_tree.terms.target for packed_tree in packed], np.int32),
        temperature=_concatenate([packed_tree.terms.temperature for packed_tree in packed], np.float32),
        entry_indices=_concatenate(
            [packed_tree.terms.entry_indices + first for packed_tree, first in _zip_offsets(packed, entries)], np.int64
        ),
    )
    return PackedTrees(
        ids=_concatenate([packed_tree.ids for packed_tree in packed], np.int32),
        depths=_concatenate([packed_tree.depths for packed_tree in packed], np.int32),
        before=_concatenate(before, np.int32),
        subtree_ends=_concatenate(
            [packed_tree.subtree_ends + offset for packed_tree, offset in _zip_offsets(packed, offsets)], np.int32
        ),
        terms=terms,
    )


def make_path_tree(ids: Ints, tokens: Indices, temperature: Floats) -> TokenTree:
    """The tree of a trace: a single path."""
    return TokenTree(ids, np.array([0, len(ids)], np.int64), np.array([ROOT], np.int32), tokens, temperature)


def _inline_tiny_nodes(tree: TokenTree) -> TokenTree:
    """Copies tiny nodes above long branches into each branch; only the first branch has their terms. A branch repeats
    at most _TINY_NODE_TOKENS tokens, however many such nodes are above it."""
    tiny = _find_tiny_nodes(tree)
    if not tiny.any():
        return tree
    prefixes: dict[int, tuple[Indices, int]] = {}  # by tiny node: what its branches begin with, and below whom they are
    new_index: dict[int, int] = {}  # by node that stays
    nodes: list[Indices] = []
    parents: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        prefix, ancestor = prefixes.get(parent, (_NO_INDICES, new_index.get(parent, ROOT)))
        token_indices = np.concatenate([prefix, np.arange(tree.starts[node], tree.starts[node + 1])])
        if tiny[node] and len(token_indices) <= _TINY_NODE_TOKENS:
            prefixes[node] = token_indices, ancestor
            continue
        new_index[node] = len(nodes)
        nodes.append(token_indices)
        parents.append(ancestor)
    origin = np.concatenate(nodes)
    new_indices = np.empty(len(tree.ids), np.int64)
    new_indices[origin[::-1]] = np.arange(len(origin))[::-1]  # the first is written last
    return TokenTree(
        ids=tree.ids[origin],
        starts=np.cumsum([0, *map(len, nodes)]).astype(np.int64),
        parents=np.array(parents, np.int32),
        tokens=new_indices[tree.tokens],
        temperature=tree.temperature,
    )


def _find_tiny_nodes(tree: TokenTree) -> NDArray[np.bool_]:
    """Which nodes are tiny and have at least two branches, all of them long."""
    lengths = np.diff(tree.starts)
    has_parent = tree.parents != ROOT
    parents_of_nodes = tree.parents[has_parent]
    children = np.bincount(parents_of_nodes, minlength=len(lengths))
    shortest = np.full(len(lengths), _LONG_BRANCH_TOKENS, np.int64)
    np.minimum.at(shortest, parents_of_nodes, _compute_subtree_sizes(tree)[has_parent])
    tiny: NDArray[np.bool_] = (
        (lengths > 0) & (lengths <= _TINY_NODE_TOKENS) & (children > 1) & (shortest >= _LONG_BRANCH_TOKENS)
    )
    return tiny


def _compute_subtree_sizes(tree: TokenTree) -> Indices:
    """The tokens of each node's subtree."""
    sizes = np.diff(tree.starts).astype(np.int64)
    for node in range(len(sizes) - 1, -1, -1):
        parent = int(tree.parents[node])
        if parent != ROOT:
            sizes[parent] += sizes[node]
    return sizes


def _pack_tree(tree: TokenTree) -> PackedTrees:
    order, ends = _order_depth_first(tree)
    lengths = np.diff(tree.starts)
    first_tokens = np.zeros(len(lengths), np.int64)  # of each node, packed
    first_tokens[order] = np.cumsum(lengths[order]) - lengths[order]

    before = np.arange(-1, len(tree.ids) - 1, dtype=np.int64)
    depths = np.zeros(len(tree.ids), np.int64)
    last_tokens = np.full(len(lengths), ROOT, np.int64)  # the packed token that a node's children go on from
    child_depths = np.zeros(len(lengths), np.int64)  # the depth of its children
    for node in order:
        parent = tree.parents[node]
        predecessor, depth = (ROOT, 0) if parent == ROOT else (last_tokens[parent], child_depths[parent])
        start, length = first_tokens[node], lengths[node]
        if length:
            before[start] = predecessor
            depths[start : start + length] = np.arange(depth, depth + length)
        last_tokens[node] = start + length - 1 if length else predecessor
        child_depths[node] = depth + length

    # where each packed token was
    origin = np.concatenate([np.arange(tree.starts[node], tree.starts[node + 1]) for node in order] or [np.empty(0)])
    origin = origin.astype(np.int64)
    packed_indices = np.empty(len(origin), np.int64)
    packed_indices[origin] = np.arange(len(origin))
    token = packed_indices[tree.tokens]
    positions = before[token]
    if (positions == ROOT).any():
        raise ValueError("A token without anything before it can't be trained: nothing predicts it.")
    order_by_position = np.argsort(positions, kind="stable")
    terms = LossTerms(
        positions=positions[order_by_position],
        target=tree.ids[tree.tokens][order_by_position].astype(np.int32),
        temperature=tree.temperature[order_by_position].astype(np.float32),
        entry_indices=order_by_position.astype(np.int64),
    )
    return PackedTrees(
        ids=tree.ids[origin].astype(np.int32),
        depths=depths.astype(np.int32),
        before=before.astype(np.int32),
        subtree_ends=np.repeat(ends[order], lengths[order]).astype(np.int32),
        terms=terms,
    )


def _order_depth_first(tree: TokenTree) -> tuple[Indices, Indices]:
    """The nodes in packed order, and the end of each node's subtree."""
    count = len(tree.parents)
    sizes = _compute_subtree_sizes(tree)
    leaf_counts = np.zeros(count, np.int64)  # that end below it
    children: list[list[int]] = [[] for _ in range(count)]
    roots: list[int] = []
    for node in range(count - 1, -1, -1):
        parent = int(tree.parents[node])
        leaf_counts[node] = max(1, leaf_counts[node])
        if parent == ROOT:
            roots.append(node)
        else:
            children[parent].append(node)
            leaf_counts[parent] += leaf_counts[node]

    def sort_key(node: int) -> tuple[int, int, int]:
        """Nodes with the largest key come first: long leaves, shortest first, since a short trunk is joined to what
        follows it and both wait for the others; then nodes that branch; then short leaves."""
        size = int(sizes[node])
        if leaf_counts[node] > 1:
            return 1, size, -node
        return (2, -size, -node) if size >= _LONG_LEAF_TOKENS else (0, size, -node)

    order: list[int] = []
    ends = np.zeros(count, np.int64)
    position = 0
    stack = sorted(roots, key=sort_key)
    while stack:
        node = stack.pop()
        order.append(node)
        ends[node] = position + sizes[node]
        position += int(tree.starts[node + 1] - tree.starts[node])
        stack.extend(sorted(children[node], key=sort_key))
    return np.array(order, np.int64), ends


def _zip_offsets(packed: list[PackedTrees], offsets: NDArray[np.int64]) -> Iterable[tuple[PackedTrees, np.int64]]:
    return zip(packed, offsets[:-1], strict=True)


def _concatenate(arrays: list[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.empty(0, kind)


# Chunks


class Chunk(Struct):
    """Packed tokens `start` to `stop`."""

    start: int
    stop: int
    context: list[tuple[int, int]]  # the path to its first token, as intervals of packed tokens
    last_use: int  # the packed token up to which other chunks attend to it
    fully_visible_tokens: int  # leading tokens of its context that all of its tokens attend to
    is_one_path: bool
    fork_count: int = 0  # tokens that later chunks continue
    keeps_activations: bool = True  # until its backward pass

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def context_length(self) -> int:
        """Tokens of its context."""
        return sum(stop - start for start, stop in self.context)

    @property
    def needs_no_mask(self) -> bool:
        """The chunk is one path, and all of it attends to its whole context."""
        return self.is_one_path and self.fully_visible_tokens == self.context_length


class MemoryBudget(Struct, frozen=True):
    """How many tokens' activations may be kept at the same time, how many bytes everything in memory may take, and what
    each token costs."""

    kept_tokens: int
    max_bytes: float = math.inf
    activation_bytes: float = 0.0  # per token of a chunk in progress, or kept
    branching_bytes: float = 0.0  # in addition, in a chunk that branches
    kv_bytes: float = 0.0  # keys and values
    kv_gradient_bytes: float = 0.0  # gradients of keys and values, while other chunks attend to them
    score_bytes: float = 0.0  # per pair of tokens, where attention stores its scores
    recurrent_state_bytes: float = 0.0  # per fork: a recurrent state and its gradient
    length_multiple: int | None = (
        None  # of flash attention's lengths, where it is used; else each chunk copies its context
    )
    splits_context: bool = False  # whether flash attention takes what all of a branching chunk sees
    windowed_share: float = 0.0  # share of layers with a sliding window, which copy any context

    def estimate_waiting_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk that other chunks attend to, without activations."""
        return len(chunk) * (self.kv_bytes + self.kv_gradient_bytes) + chunk.fork_count * self.recurrent_state_bytes

    def estimate_active_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk whose activations are kept, or that is in its backward pass."""
        token = self.activation_bytes + (0 if chunk.needs_no_mask else self.branching_bytes)
        token += self.kv_gradient_bytes if chunk.last_use > chunk.stop else 0
        copied = self._count_copied_tokens(chunk)
        # Twice: as inputs, and in a row with the chunk's own. Then what comes back to the inputs.
        copies = 3 * copied + len(chunk) if copied else 0
        pairs = len(chunk) * (chunk.context_length + len(chunk))
        return (
            len(chunk) * token
            + copies * self.kv_bytes
            + pairs * self.score_bytes
            + chunk.fork_count * self.recurrent_state_bytes
        )

    def _count_copied_tokens(self, chunk: Chunk) -> float:
        """Context tokens whose keys and values the chunk copies."""
        if self.length_multiple is None or not (chunk.needs_no_mask or self.splits_context):
            return chunk.context_length
        unshared = (
            0
            if chunk.needs_no_mask
            else chunk.context_length - round_context_length(chunk.fully_visible_tokens, self.length_multiple)
        )
        return unshared + self.windowed_share * (chunk.context_length - unshared)


class MemoryNeed(Struct, frozen=True):
    """The peak memory of a plan."""

    bytes: float
    kept_tokens: int


class _ChunkingOption(Struct):
    """One way to form chunks, to be compared by cost."""

    max_joined_tokens: int
    """At most this many tokens are joined to a long part of their path, before or after it."""
    piece_tokens: int
    """Long parts that other chunks attend to are cut into pieces of this size, so that some of them can be kept."""


def split_into_chunks(packed: PackedTrees, chunk_tokens: int, budget: MemoryBudget) -> list[Chunk]:
    """Splits packed trees into chunks of at most `chunk_tokens`. Chunks are shorter where the budget has no room for
    their activations."""
    if not len(packed):
        return []
    runs = _find_run_starts(packed)
    while True:
        chunks = _choose_cheapest(packed, runs, chunk_tokens, budget)
        if chunk_tokens <= MIN_CHUNK_TOKENS or choose_kept_activations(chunks, budget).bytes <= budget.max_bytes:
            return chunks
        chunk_tokens = max(MIN_CHUNK_TOKENS, chunk_tokens // 2)


def _choose_cheapest(packed: PackedTrees, runs: Indices, chunk_tokens: int, budget: MemoryBudget) -> list[Chunk]:
    parts = list(_split_into_parts(packed, chunk_tokens))

    def build_chunks(option: _ChunkingOption) -> list[Chunk]:
        candidate = [
            _build_chunk(packed, runs, start, stop) for start, stop in _group_parts(packed, parts, chunk_tokens, option)
        ]
        choose_kept_activations(candidate, budget)
        return candidate

    def estimate_cost(build_chunks: list[Chunk]) -> float:
        """In tokens. A forward pass is a third of the work, and a short chunk takes as long as a longer one (see
        DEFAULT_CHUNK_TOKENS in memory.py)."""
        return sum(
            max(len(chunk), chunk_tokens / 5) * (1 if chunk.keeps_activations else 4 / 3) for chunk in build_chunks
        )

    pieces = chunk_tokens, max(1, chunk_tokens // 2)
    options = [
        _ChunkingOption(joined_tokens, piece)
        for joined_tokens in (chunk_tokens // 8, chunk_tokens // 16, 0)
        for piece in pieces
    ]
    return min(map(build_chunks, options), key=estimate_cost)


def _find_segment_starts(packed: PackedTrees) -> Indices:
    """The starts of segments. A segment is part of one path, and the same tokens attend to all of it."""
    follows = packed.before[1:] == np.arange(len(packed) - 1)
    same = packed.subtree_ends[1:] == packed.subtree_ends[:-1]
    return np.concatenate([[0], np.flatnonzero(~(follows & same)) + 1])


def _find_run_starts(packed: PackedTrees) -> Indices:
    """Of each token, the start of the contiguous packed run of its path that ends with it."""
    positions = np.arange(len(packed))
    run_starts: Indices = np.maximum.accumulate(np.where(packed.before == positions - 1, 0, positions))
    return run_starts


class _ChunkPart(Struct):
    """Tokens that are only cut if they are one path. `end` is the end of the subtree that starts with them."""

    start: int
    stop: int
    end: int
    is_long: bool

    @property
    def is_waiting(self) -> bool:
        """Whether later tokens attend to it."""
        return self.stop < self.end


def _split_into_parts(packed: PackedTrees, max_tokens: int) -> Iterator[_ChunkPart]:
    """Whole subtrees where they fit, since their chunks need not wait for others, which takes memory or a second
    forward pass. But long segments of one path are separate parts, because attention is fastest there."""
    segments = _find_segment_starts(packed)
    edges = [*segments.tolist(), len(packed)]
    lengths = np.diff(edges)
    long = max(1, max_tokens // 4)
    long_segments = [*np.flatnonzero(lengths >= long).tolist(), len(segments)]
    segment = 0
    while segment < len(segments):
        start, end = edges[segment], int(packed.subtree_ends[edges[segment]])
        next_segment = int(np.searchsorted(segments, end))
        if end - start > max_tokens or long_segments[bisect_left(long_segments, segment)] < next_segment:
            next_segment = segment + 1
        # A branching part is no faster by itself.
        min_long_tokens = long if next_segment == segment + 1 else max(1, max_tokens // 2)
        yield _ChunkPart(start, edges[next_segment], end, is_long=edges[next_segment] - start >= min_long_tokens)
        segment = next_segment


def _group_parts(
    packed: PackedTrees, parts: Iterable[_ChunkPart], max_tokens: int, option: _ChunkingOption
) -> list[tuple[int, int]]:
    """Groups parts into chunks: a long part alone or with a few tokens of its path, short parts together."""
    chunks: list[tuple[int, int]] = []
    grows = False  # whether the last chunk consists of short parts
    edge = 0  # where the last long part ended
    for part in parts:
        start, stop = part.start, part.stop
        first, last = chunks[-1] if chunks else (0, 0)
        fits = bool(chunks) and stop - first <= max_tokens
        if not part.is_long:
            # A waiting part beside or above the last chunk would make that chunk wait as well.
            if grows:
                joins = (
                    last - first <= option.max_joined_tokens
                    or not part.is_waiting
                    or bool(packed.before[start] > packed.before[first])
                )
            else:
                joins = (
                    part.is_waiting and stop - edge <= option.max_joined_tokens and _is_one_path(packed, last - 1, stop)
                )
            if fits and joins:
                chunks[-1] = (first, stop)
            else:
                chunks.append((start, stop))
                grows = True
            continue
        if grows and fits and last - first <= option.max_joined_tokens and _is_one_path(packed, first, stop):
            chunks[-1] = (first, stop)
        elif part.is_waiting or stop - start > max_tokens:
            chunks += pairwise([start, *_choose_cut_positions(start, stop, option.piece_tokens), stop])
        else:
            chunks.append((start, stop))
        grows, edge = False, stop
    return chunks


def _choose_cut_positions(start: int, stop: int, max_tokens: int) -> list[int]:
    """Cuts into pieces of the maximum length, and some of half that, so that no piece is short and there are few
    different lengths, as attention's kernels need (see flash_attention.py)."""
    cuts = []
    while stop - start > max_tokens:
        start += max_tokens if 2 * (stop - start) >= 3 * max_tokens else max(1, max_tokens // 2)
        cuts.append(start)
    return cuts


def _build_chunk(packed: PackedTrees, runs: Indices, start: int, stop: int) -> Chunk:
    context = _find_path(packed, runs, int(packed.before[start]))
    fully_visible = sum(
        int((packed.subtree_ends[low:high] >= stop).sum()) for low, high in context
    )  # a path's ends never grow
    last_use = int(packed.subtree_ends[start:stop].max())
    return Chunk(
        start=start,
        stop=stop,
        context=context,
        last_use=max(last_use, stop),
        fully_visible_tokens=fully_visible,
        is_one_path=_is_one_path(packed, start, stop),
        fork_count=_count_forks(packed, start, stop, last_use),
    )


def _count_forks(packed: PackedTrees, start: int, stop: int, last_use: int) -> int:
    before = packed.before[stop:last_use]
    return len(np.unique(before[(before >= start) & (before < stop)]))


def _is_one_path(packed: PackedTrees, start: int, stop: int) -> bool:
    return bool((packed.before[start + 1 : stop] == np.arange(start, stop - 1)).all())


def _find_path(packed: PackedTrees, runs: Indices, token: int) -> list[tuple[int, int]]:
    """The path from the root to a token, as intervals of packed tokens."""
    path: list[tuple[int, int]] = []
    while token != ROOT:
        low = int(runs[token])
        path.append((low, token + 1))
        token = int(packed.before[low])
    return path[::-1]


class _WaitingChunk(Struct):
    """A chunk that later chunks attend to, and the memory in use with it."""

    chunk: Chunk
    bytes_before: float  # bytes of the chunks that wait before it
    tokens: int  # largest number that waited at the same time from it on
    bytes: float  # of those, with all their activations


def choose_kept_activations(chunks: Iterable[Chunk], budget: MemoryBudget) -> MemoryNeed:
    """Decides which chunks keep their activations, and returns the peak memory. A chunk keeps them if at most
    `kept_tokens` wait from it on at any time, and if there is room beside the chunks that wait before it. A chunk that
    no other needs takes no more memory by keeping them."""
    waiting: list[_WaitingChunk] = []
    max_bytes, max_tokens = 0.0, 0
    for chunk in chunks:
        bytes_before = waiting[-1].bytes_before + budget.estimate_waiting_bytes(waiting[-1].chunk) if waiting else 0.0
        active_bytes = budget.estimate_active_bytes(chunk)
        waiting.append(_WaitingChunk(chunk, bytes_before, len(chunk), active_bytes))
        while waiting and waiting[-1].chunk.last_use <= chunk.stop:
            ended = waiting.pop()
            active_bytes = budget.estimate_active_bytes(ended.chunk)
            fits = ended.bytes == active_bytes or ended.bytes_before + ended.bytes <= budget.max_bytes
            ended.chunk.keeps_activations = fits and ended.tokens <= budget.kept_tokens
            max_bytes = max(
                max_bytes, ended.bytes_before + (ended.bytes if ended.chunk.keeps_activations else active_bytes)
            )
            max_tokens = max(max_tokens, ended.tokens if ended.chunk.keeps_activations else 0)
            if waiting:
                last = waiting[-1]
                last.tokens = max(last.tokens, len(last.chunk) + ended.tokens)
                last.bytes = max(last.bytes, budget.estimate_active_bytes(last.chunk) + ended.bytes)
    return MemoryNeed(max_bytes, max_tokens)


class ChunkPlan(Struct):
    chunks: list[Chunk]
    need: MemoryNeed


class Chunker:
    """Splits packed trees into chunks for one model. After running out of memory it keeps fewer activations."""

    def __init__(self, chunk_tokens: int, budget: MemoryBudget) -> None:
        self._max_chunk_tokens = chunk_tokens
        self._budget = budget
        self._kept_share = 1.0  # share of the activations that the budget allows
        self._halvings = 0  # of the chunk size

    @property
    def chunk_tokens(self) -> int:
        return self._max_chunk_tokens >> self._halvings

    def plan(self, packed: PackedTrees, *, training: bool) -> ChunkPlan:
        """Without `training`, no activations are kept."""
        budget = self._budget
        if not training:
            budget = replace(
                budget,
                kept_tokens=0,
                max_bytes=math.inf,
                activation_bytes=0.0,
                branching_bytes=0.0,
                kv_gradient_bytes=0.0,
            )
        chunks = split_into_chunks(packed, self.chunk_tokens, budget)
        need = choose_kept_activations(chunks, budget)
        if training and self._kept_share < 1:  # of the same chunks, so the gradient stays the same
            kept_tokens = max(self.chunk_tokens, int(self._kept_share * need.kept_tokens))
            need = choose_kept_activations(chunks, replace(budget, kept_tokens=min(budget.kept_tokens, kept_tokens)))
        return ChunkPlan(chunks, need)

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None:
        """Keeps less from now on: half the activations, then one chunk's, then shorter chunks. Returns a description of
        the new plan, or None if no less is possible for these trees."""
        previous = self.plan(packed, training=training)
        while self._reduce(training):
            plan = self.plan(packed, training=training)
            if plan.chunks != previous.chunks:
                description = f", activations of {plan.need.kept_tokens} kept" if training else ""
                return f"{max(map(len, plan.chunks))} tokens at a time{description}"
        return None

    def _reduce(self, training: bool) -> bool:
        if training and self._kept_share:
            self._kept_share = self._kept_share / 2 if self._kept_share == 1 else 0.0
        elif self.chunk_tokens > MIN_CHUNK_TOKENS:
            self._halvings += 1
        else:
            return False
        return True

"""Packs token trees for a model and splits them into chunks, which are computed one after the other.

    TokenTree ─► pack_trees ─► PackedTrees ─► Chunker.plan ─► Chunk, Chunk, ...

A tree is a group's `prefix_tree`, or a single trace (a tree of one path). Packed depth first, a token's descendants are
the tokens right behind it, up to where its subtree ends. So one number a token says who sees whom
(`PackedTrees.subtree_ends`), and no mask is ever written down.

A chunk is an interval of the packed tokens. What its tokens see before it is the path to its first token, which has
gone through the model already; its keys and values are still there. Going backwards, a chunk's turn comes when all that
sees it is done; what came back to its keys and values by then is part of its gradient. So the gradient is exact
wherever the cuts are.

A chunk whose activations are kept goes through the model once; the others twice, like a checkpoint. The ends of paths
are kept, as many tokens as possible: what lies below a branching is entered often, and left soon. How many are kept
depends on all that is in memory at the same time (`MemoryBudget`). A long path leaves less for activations, since the
keys and values of its chunks wait, and so do the gradients of these.
"""

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
"""Tokens. Replies often begin with the same word or two. A node of so few, with long branches below it, would go
through the model by itself, which takes as long for one token as for thousands, or have one branch wait for others."""
_LONG_LEAF_TOKENS = 4096
"""Tokens of an end that goes through a large model by itself, or with few others."""
_NO_INDICES: Indices = np.empty(0, np.int64)
MIN_CHUNK_TOKENS = 256
"""Tokens of a chunk: fewer take about as long as so many, and free next to no memory."""


class TokenTree(Struct):
    """Node i's ids are `ids[starts[i]:starts[i + 1]]`, below node `parents[i]` (ROOT for none), which stands before it.

    What is wanted: the log-probabilities of the tokens at `tokens` (indices into `ids`), one entry for each sampling
    of a token, with logits divided by `temperature`."""

    ids: Ints
    starts: Indices
    parents: Ints
    tokens: Indices
    temperature: Floats


class LossTerms(Struct):
    """What is asked of the model: one entry for each (sample, trained token), in the order of `at`."""

    positions: Indices  # the packed token behind which it was sampled
    target: Ints  # its id
    temperature: Floats
    entry_indices: Indices  # its number among the entries of all trees, as they were given

    def __len__(self) -> int:
        return len(self.positions)


class PackedTrees(Struct):
    """Trees, one behind the other. Arrays have one entry a token; `q` sees `k` iff `k <= q < ends[k]`."""

    ids: Ints
    depths: Ints  # its position on its path
    before: Ints  # the packed token before it on its path; ROOT at the first
    subtree_ends: Ints  # where its subtree ends
    terms: LossTerms

    def __len__(self) -> int:
        return len(self.ids)


def pack_trees(trees: Sequence[TokenTree]) -> PackedTrees:
    """Of a node's children, those that branch are packed before ends: so what waits for others stands together, and the
    rest, which is done with at once, behind it. But long ends come first of all: see `_depth_first`."""
    packed = [_pack_tree(_inline_tiny_nodes(tree)) for tree in trees]
    offsets = np.cumsum([0, *(len(one) for one in packed)])
    if offsets[-1] >= 2**31:
        raise ValueError(f"{offsets[-1]} tokens are too many for one pass: 2^31 - 1 at most.")
    entries = np.cumsum([0, *(len(one.terms) for one in packed)])
    before = [np.where(one.before == ROOT, ROOT, one.before + offset) for one, offset in _zip_offsets(packed, offsets)]
    terms = LossTerms(
        positions=_concatenate(
            [one.terms.positions + offset for one, offset in _zip_offsets(packed, offsets)], np.int64
        ),
        target=_concatenate([one.terms.target for one in packed], np.int32),
        temperature=_concatenate([one.terms.temperature for one in packed], np.float32),
        entry_indices=_concatenate(
            [one.terms.entry_indices + first for one, first in _zip_offsets(packed, entries)], np.int64
        ),
    )
    return PackedTrees(
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


def _inline_tiny_nodes(tree: TokenTree) -> TokenTree:
    """Without tiny nodes above long branches: each branch repeats their tokens, and only the first has their terms. No
    branch repeats more than a few tokens, however many such nodes there are above each other."""
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
    np.minimum.at(shortest, above, _compute_subtree_sizes(tree)[below])
    tiny: NDArray[np.bool_] = (
        (lengths > 0) & (lengths <= _TINY_NODE_TOKENS) & (children > 1) & (shortest >= _LONG_BRANCH_TOKENS)
    )
    return tiny


def _compute_subtree_sizes(tree: TokenTree) -> Indices:
    """Of each node's subtree, in tokens."""
    sizes = np.diff(tree.starts).astype(np.int64)
    for node in range(len(sizes) - 1, -1, -1):
        parent = int(tree.parents[node])
        if parent != ROOT:
            sizes[parent] += sizes[node]
    return sizes


def _pack_tree(tree: TokenTree) -> PackedTrees:
    order, ends = _order_depth_first(tree)
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
    terms = LossTerms(
        positions=at[sorted_],
        target=tree.ids[tree.tokens][sorted_].astype(np.int32),
        temperature=tree.temperature[sorted_].astype(np.float32),
        entry_indices=sorted_.astype(np.int64),
    )
    return PackedTrees(
        ids=tree.ids[origin].astype(np.int32),
        depths=depths.astype(np.int32),
        before=before.astype(np.int32),
        subtree_ends=np.repeat(ends[order], lengths[order]).astype(np.int32),
        terms=terms,
    )


def _order_depth_first(tree: TokenTree) -> tuple[Indices, Indices]:
    """Nodes in packed order, and where the subtree of each ends."""
    count = len(tree.parents)
    sizes = _compute_subtree_sizes(tree)
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


def _zip_offsets(packed: list[PackedTrees], numbers: NDArray[np.int64]) -> Iterable[tuple[PackedTrees, np.int64]]:
    return zip(packed, numbers[:-1], strict=True)


def _concatenate(arrays: list[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays).astype(kind) if arrays else np.empty(0, kind)


# Chunks


class Chunk(Struct):
    """Packed tokens `start` to `stop`."""

    start: int
    stop: int
    context: list[tuple[int, int]]  # the path to its first token, as intervals of packed tokens
    last_use: int  # up to this packed token others see it
    fully_visible_tokens: int  # tokens of its context, from its beginning on, that all of it sees
    is_one_path: bool
    fork_count: int = 0  # its tokens that later chunks go on from
    keeps_activations: bool = True  # its activations are, until its backward pass

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def context_length(self) -> int:
        """Tokens of its context."""
        return sum(stop - start for start, stop in self.context)

    @property
    def needs_no_mask(self) -> bool:
        """It is one path, and all of it sees all of its context."""
        return self.is_one_path and self.fully_visible_tokens == self.context_length


class MemoryBudget(Struct, frozen=True):
    """How many tokens' activations may be kept at the same time, and how many bytes all that is in memory may take:
    with what a token takes of them, by what it is there for."""

    kept_tokens: int
    max_bytes: float = math.inf
    activation_bytes: float = 0.0  # of a chunk on its way, or kept
    branching_bytes: float = 0.0  # as well, in a chunk that branches
    kv_bytes: float = 0.0  # and values
    kv_gradient_bytes: float = 0.0  # of its keys and values, while others see them
    score_bytes: float = 0.0  # of a pair of tokens, where attention writes them down
    recurrent_state_bytes: float = 0.0  # of recurrent layers behind a token that others go on from, and its gradient
    length_multiple: int | None = (
        None  # of flash attention's lengths, where it is used; else each chunk copies its context
    )
    splits_context: bool = False  # whether flash attention takes what all of a branching chunk sees
    windowed_share: float = 0.0  # share of layers with a sliding window, which copy any context

    def estimate_waiting_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk that others see, without activations."""
        return len(chunk) * (self.kv_bytes + self.kv_gradient_bytes) + chunk.fork_count * self.recurrent_state_bytes

    def estimate_active_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk that is kept, or that goes through the model for its backward pass."""
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
        """Tokens of its context whose keys and values it has copies of."""
        if self.length_multiple is None or not (chunk.needs_no_mask or self.splits_context):
            return chunk.context_length
        left = (
            0
            if chunk.needs_no_mask
            else chunk.context_length - round_context_length(chunk.fully_visible_tokens, self.length_multiple)
        )
        return left + self.windowed_share * (chunk.context_length - left)


class MemoryNeed(Struct, frozen=True):
    """What some chunks take at most at the same time."""

    bytes: float
    kept_tokens: int


class _ChunkingOption(Struct):
    """What can be done one way or the other."""

    max_joined_tokens: int
    """So many tokens go with a long part of their path, before them or behind: if it is behind them, it waits with them
    for whatever else branches off there."""
    piece_tokens: int
    """Long parts that wait for others are cut into such pieces: of several, some may be kept."""


def split_into_chunks(packed: PackedTrees, chunk_tokens: int, budget: MemoryBudget) -> list[Chunk]:
    """Chunks of `chunk_tokens` at most. Where the budget has no room for such a chunk's activations behind all that
    waits, they are shorter."""
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

    def chunks(way: _ChunkingOption) -> list[Chunk]:
        made = [
            _build_chunk(packed, runs, start, stop) for start, stop in _group_parts(packed, parts, chunk_tokens, way)
        ]
        choose_kept_activations(made, budget)
        return made

    def cost(chunks: list[Chunk]) -> float:
        """In tokens: a forward pass is a third of all, and a short chunk takes as long as a longer one (see
        DEFAULT_CHUNK_TOKENS in memory.py)."""
        return sum(max(len(chunk), chunk_tokens / 5) * (1 if chunk.keeps_activations else 4 / 3) for chunk in chunks)

    pieces = chunk_tokens, max(1, chunk_tokens // 2)
    ways = [_ChunkingOption(few, piece) for few in (chunk_tokens // 8, chunk_tokens // 16, 0) for piece in pieces]
    return min(map(chunks, ways), key=cost)


def _find_segment_starts(packed: PackedTrees) -> Indices:
    """Where stretches begin: tokens of one path, all of which the same tokens see."""
    follows = packed.before[1:] == np.arange(len(packed) - 1)
    same = packed.subtree_ends[1:] == packed.subtree_ends[:-1]
    return np.concatenate([[0], np.flatnonzero(~(follows & same)) + 1])


def _find_run_starts(packed: PackedTrees) -> Indices:
    """Of each token, the first one from which on packed tokens follow each other on its path, up to it."""
    places = np.arange(len(packed))
    found: Indices = np.maximum.accumulate(np.where(packed.before == places - 1, 0, places))
    return found


class _ChunkPart(Struct):
    """Tokens that are cut only if they are one path. `end` is where the subtree ends that begins with them."""

    start: int
    stop: int
    end: int
    is_long: bool

    @property
    def is_waiting(self) -> bool:
        """For others, that see it."""
        return self.stop < self.end


def _split_into_parts(packed: PackedTrees, max_tokens: int) -> Iterator[_ChunkPart]:
    """Whole subtrees where they fit: a chunk of such is done with at once, and what waits for others takes memory, or
    goes through twice. But long stretches of one path are parts by themselves: attention is quickest there."""
    stretches = _find_segment_starts(packed)
    edges = [*stretches.tolist(), len(packed)]
    lengths = np.diff(edges)
    long = max(1, max_tokens // 4)
    long_ones = [*np.flatnonzero(lengths >= long).tolist(), len(stretches)]
    number = 0
    while number < len(stretches):
        start, end = edges[number], int(packed.subtree_ends[edges[number]])
        behind = int(np.searchsorted(stretches, end))
        if end - start > max_tokens or long_ones[bisect_left(long_ones, number)] < behind:
            behind = number + 1
        # What branches is no quicker by itself.
        least = long if behind == number + 1 else max(1, max_tokens // 2)
        yield _ChunkPart(start, edges[behind], end, is_long=edges[behind] - start >= least)
        number = behind


def _group_parts(
    packed: PackedTrees, parts: Iterable[_ChunkPart], max_tokens: int, option: _ChunkingOption
) -> list[tuple[int, int]]:
    """A long part is a chunk by itself, or with few tokens of its path; short ones go together."""
    chunks: list[tuple[int, int]] = []
    grows = False  # the last of them, if it is of short parts
    edge = 0  # where the last long part ended
    for part in parts:
        start, stop = part.start, part.stop
        first, last = chunks[-1] if chunks else (0, 0)
        fits = bool(chunks) and stop - first <= max_tokens
        if not part.is_long:
            # What waits, and hangs beside the last chunk or above it, would make that wait as well.
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
    """Pieces as long as they may be, and some half as long, so that none is short, and lengths are few: attention's
    kernels want that (see flash_attention.py)."""
    cuts = []
    while stop - start > max_tokens:
        start += max_tokens if 2 * (stop - start) >= 3 * max_tokens else max(1, max_tokens // 2)
        cuts.append(start)
    return cuts


def _build_chunk(packed: PackedTrees, runs: Indices, start: int, stop: int) -> Chunk:
    context = _find_path(packed, runs, int(packed.before[start]))
    whole = sum(int((packed.subtree_ends[low:high] >= stop).sum()) for low, high in context)  # a path's ends never grow
    needed = int(packed.subtree_ends[start:stop].max())
    return Chunk(
        start=start,
        stop=stop,
        context=context,
        last_use=max(needed, stop),
        fully_visible_tokens=whole,
        is_one_path=_is_one_path(packed, start, stop),
        fork_count=_count_forks(packed, start, stop, needed),
    )


def _count_forks(packed: PackedTrees, start: int, stop: int, needed: int) -> int:
    before = packed.before[stop:needed]
    return len(np.unique(before[(before >= start) & (before < stop)]))


def _is_one_path(packed: PackedTrees, start: int, stop: int) -> bool:
    return bool((packed.before[start + 1 : stop] == np.arange(start, stop - 1)).all())


def _find_path(packed: PackedTrees, runs: Indices, token: int) -> list[tuple[int, int]]:
    """The path that ends with a token, as intervals of packed tokens."""
    path: list[tuple[int, int]] = []
    while token != ROOT:
        low = int(runs[token])
        path.append((low, token + 1))
        token = int(packed.before[low])
    return path[::-1]


class _WaitingChunk(Struct):
    """A chunk that others see, and what is in memory with it."""

    chunk: Chunk
    bytes_before: float  # bytes of what waits before it
    tokens: int  # that ever waited from it on, itself included
    bytes: float  # of these, with all their activations


def choose_kept_activations(chunks: Iterable[Chunk], budget: MemoryBudget) -> MemoryNeed:
    """Decides which chunks are kept: those from which on, themselves included, no more than `kept_tokens` wait at any
    time, and for whose activations there is room beside all that waits before them. What is done with at once is no
    larger if it is kept."""
    waiting: list[_WaitingChunk] = []
    most_bytes, most_tokens = 0.0, 0
    for chunk in chunks:
        before = waiting[-1].bytes_before + budget.estimate_waiting_bytes(waiting[-1].chunk) if waiting else 0.0
        own = budget.estimate_active_bytes(chunk)
        waiting.append(_WaitingChunk(chunk, before, len(chunk), own))
        while waiting and waiting[-1].chunk.last_use <= chunk.stop:
            ended = waiting.pop()
            own = budget.estimate_active_bytes(ended.chunk)
            fits = ended.bytes == own or ended.bytes_before + ended.bytes <= budget.max_bytes
            ended.chunk.keeps_activations = fits and ended.tokens <= budget.kept_tokens
            most_bytes = max(most_bytes, ended.bytes_before + (ended.bytes if ended.chunk.keeps_activations else own))
            most_tokens = max(most_tokens, ended.tokens if ended.chunk.keeps_activations else 0)
            if waiting:
                last = waiting[-1]
                last.tokens = max(last.tokens, len(last.chunk) + ended.tokens)
                last.bytes = max(last.bytes, budget.estimate_active_bytes(last.chunk) + ended.bytes)
    return MemoryNeed(most_bytes, most_tokens)


class ChunkPlan(Struct):
    chunks: list[Chunk]
    need: MemoryNeed


class Chunker:
    """Splits packed trees into chunks for one model. After running out of memory it keeps fewer activations."""

    def __init__(self, chunk_tokens: int, budget: MemoryBudget) -> None:
        self._max_chunk_tokens = chunk_tokens
        self._budget = budget
        self._kept_share = 1.0  # of what the budget lets be kept
        self._halvings = 0  # of chunks

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
        if training and self._kept_share < 1:  # of the same chunks: so the gradient is the same, too
            most = max(self.chunk_tokens, int(self._kept_share * need.kept_tokens))
            need = choose_kept_activations(chunks, replace(budget, kept_tokens=min(budget.kept_tokens, most)))
        return ChunkPlan(chunks, need)

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None:
        """Keeps less from now on: half the activations, then one chunk's, then shorter chunks. Returns a description of
        the new plan, or None if no less is possible for these trees."""
        before = self.plan(packed, training=training)
        while self._reduce(training):
            now = self.plan(packed, training=training)
            if now.chunks != before.chunks:
                kept = f", activations of {now.need.kept_tokens} kept" if training else ""
                return f"{max(map(len, now.chunks))} tokens at a time{kept}"
        return None

    def _reduce(self, training: bool) -> bool:
        if training and self._kept_share:
            self._kept_share = self._kept_share / 2 if self._kept_share == 1 else 0.0
        elif self.chunk_tokens > MIN_CHUNK_TOKENS:
            self._halvings += 1
        else:
            return False
        return True

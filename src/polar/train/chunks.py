"""A forest cut into pieces that go through a model one after the other.

A chunk is an interval of the packed tokens. What its tokens see before it is the path to its first token: all of it has
gone through the model already, and its keys and values are still there. Going backwards, a chunk's turn comes when all
that sees it has been done; what came back to its keys and values by then is part of its gradient. So the gradient is
exact wherever the cuts are.

A chunk whose activations are kept goes through the model once; the others twice, like a checkpoint. Kept are the ends
of paths, as many tokens as may be: what lies below a branching is entered often, and left soon. How many may be depends
on all that is in memory at the same time (`Budget`): a long path leaves less for activations, since the keys and values
of its chunks wait, and the gradients of these.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from polar.records.trajectory import ROOT
from polar.train.flash import round_context_length
from polar.train.forest import Forest, Indices

MIN_CHUNK_TOKENS = 256
"""Tokens of a chunk: fewer take about as long as so many, and free next to no memory."""


class Chunk(Struct):
    """Packed tokens `start` to `stop`."""

    start: int
    stop: int
    context: list[tuple[int, int]]  # the path to its first token, as intervals of packed tokens
    last_use: int  # up to this packed token others see it
    fully_visible: int  # tokens of its context, from its beginning on, that all of it sees
    is_one_path: bool
    fork_count: int = 0  # its tokens that later chunks go on from
    is_kept: bool = True  # its activations are, until its backward pass

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def context_length(self) -> int:
        """Tokens of its context."""
        return sum(stop - start for start, stop in self.context)

    @property
    def is_plain(self) -> bool:
        """It is one path, and all of it sees all of its context."""
        return self.is_one_path and self.fully_visible == self.context_length


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
    grain: int | None = None  # of flash attention's lengths, where it is used; else each chunk copies its context
    splits_context: bool = False  # whether flash attention takes what all of a branching chunk sees
    windowed_share: float = 0.0  # share of layers with a sliding window, which copy any context

    def waiting_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk that others see, without activations."""
        return len(chunk) * (self.kv_bytes + self.kv_gradient_bytes) + chunk.fork_count * self.recurrent_state_bytes

    def active_bytes(self, chunk: Chunk) -> float:
        """Bytes of a chunk that is kept, or that goes through the model for its backward pass."""
        token = self.activation_bytes + (0 if chunk.is_plain else self.branching_bytes)
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
        if self.grain is None or not (chunk.is_plain or self.splits_context):
            return chunk.context_length
        left = 0 if chunk.is_plain else chunk.context_length - round_context_length(chunk.fully_visible, self.grain)
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


def split_into_chunks(forest: Forest, chunk_tokens: int, budget: MemoryBudget) -> list[Chunk]:
    """Chunks of `chunk_tokens` at most. Where the budget has no room for such a chunk's activations behind all that
    waits, they are shorter."""
    if not len(forest):
        return []
    runs = _find_run_starts(forest)
    while True:
        chunks = _choose_cheapest(forest, runs, chunk_tokens, budget)
        if chunk_tokens <= MIN_CHUNK_TOKENS or choose_kept_chunks(chunks, budget).bytes <= budget.max_bytes:
            return chunks
        chunk_tokens = max(MIN_CHUNK_TOKENS, chunk_tokens // 2)


def _choose_cheapest(forest: Forest, runs: Indices, chunk_tokens: int, budget: MemoryBudget) -> list[Chunk]:
    parts = list(_split_into_parts(forest, chunk_tokens))

    def chunks(way: _ChunkingOption) -> list[Chunk]:
        made = [
            _build_chunk(forest, runs, start, stop) for start, stop in _group_parts(forest, parts, chunk_tokens, way)
        ]
        choose_kept_chunks(made, budget)
        return made

    def cost(chunks: list[Chunk]) -> float:
        """In tokens: a forward pass is a third of all, and a short chunk takes as long as a longer one (see CHUNK in
        fitting.py)."""
        return sum(max(len(chunk), chunk_tokens / 5) * (1 if chunk.is_kept else 4 / 3) for chunk in chunks)

    pieces = chunk_tokens, max(1, chunk_tokens // 2)
    ways = [_ChunkingOption(few, piece) for few in (chunk_tokens // 8, chunk_tokens // 16, 0) for piece in pieces]
    return min(map(chunks, ways), key=cost)


def _find_stretches(forest: Forest) -> Indices:
    """Where stretches begin: tokens of one path, all of which the same tokens see."""
    follows = forest.before[1:] == np.arange(len(forest) - 1)
    same = forest.subtree_ends[1:] == forest.subtree_ends[:-1]
    return np.concatenate([[0], np.flatnonzero(~(follows & same)) + 1])


def _find_run_starts(forest: Forest) -> Indices:
    """Of each token, the first one from which on packed tokens follow each other on its path, up to it."""
    places = np.arange(len(forest))
    found: Indices = np.maximum.accumulate(np.where(forest.before == places - 1, 0, places))
    return found


class _Part(Struct):
    """Tokens that are cut only if they are one path. `end` is where the subtree ends that begins with them."""

    start: int
    stop: int
    end: int
    is_long: bool

    @property
    def is_waiting(self) -> bool:
        """For others, that see it."""
        return self.stop < self.end


def _split_into_parts(forest: Forest, max_tokens: int) -> Iterator[_Part]:
    """Whole subtrees where they fit: a chunk of such is done with at once, and what waits for others takes memory, or
    goes through twice. But long stretches of one path are parts by themselves: attention is quickest there."""
    stretches = _find_stretches(forest)
    edges = [*stretches.tolist(), len(forest)]
    lengths = np.diff(edges)
    long = max(1, max_tokens // 4)
    long_ones = [*np.flatnonzero(lengths >= long).tolist(), len(stretches)]
    number = 0
    while number < len(stretches):
        start, end = edges[number], int(forest.subtree_ends[edges[number]])
        behind = int(np.searchsorted(stretches, end))
        if end - start > max_tokens or long_ones[bisect_left(long_ones, number)] < behind:
            behind = number + 1
        # What branches is no quicker by itself.
        least = long if behind == number + 1 else max(1, max_tokens // 2)
        yield _Part(start, edges[behind], end, is_long=edges[behind] - start >= least)
        number = behind


def _group_parts(
    forest: Forest, parts: Iterable[_Part], max_tokens: int, option: _ChunkingOption
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
                    or bool(forest.before[start] > forest.before[first])
                )
            else:
                joins = (
                    part.is_waiting and stop - edge <= option.max_joined_tokens and _is_one_path(forest, last - 1, stop)
                )
            if fits and joins:
                chunks[-1] = (first, stop)
            else:
                chunks.append((start, stop))
                grows = True
            continue
        if grows and fits and last - first <= option.max_joined_tokens and _is_one_path(forest, first, stop):
            chunks[-1] = (first, stop)
        elif part.is_waiting or stop - start > max_tokens:
            chunks += pairwise([start, *_cut_positions(start, stop, option.piece_tokens), stop])
        else:
            chunks.append((start, stop))
        grows, edge = False, stop
    return chunks


def _cut_positions(start: int, stop: int, max_tokens: int) -> list[int]:
    """Pieces as long as they may be, and some half as long, so that none is short, and lengths are few: attention's
    kernels want that (see flash.py)."""
    cuts = []
    while stop - start > max_tokens:
        start += max_tokens if 2 * (stop - start) >= 3 * max_tokens else max(1, max_tokens // 2)
        cuts.append(start)
    return cuts


def _build_chunk(forest: Forest, runs: Indices, start: int, stop: int) -> Chunk:
    context = _find_path(forest, runs, int(forest.before[start]))
    whole = sum(int((forest.subtree_ends[low:high] >= stop).sum()) for low, high in context)  # a path's ends never grow
    needed = int(forest.subtree_ends[start:stop].max())
    return Chunk(
        start=start,
        stop=stop,
        context=context,
        last_use=max(needed, stop),
        fully_visible=whole,
        is_one_path=_is_one_path(forest, start, stop),
        fork_count=_count_forks(forest, start, stop, needed),
    )


def _count_forks(forest: Forest, start: int, stop: int, needed: int) -> int:
    before = forest.before[stop:needed]
    return len(np.unique(before[(before >= start) & (before < stop)]))


def _is_one_path(forest: Forest, start: int, stop: int) -> bool:
    return bool((forest.before[start + 1 : stop] == np.arange(start, stop - 1)).all())


def _find_path(forest: Forest, runs: Indices, token: int) -> list[tuple[int, int]]:
    """The path that ends with a token, as intervals of packed tokens."""
    path: list[tuple[int, int]] = []
    while token != ROOT:
        low = int(runs[token])
        path.append((low, token + 1))
        token = int(forest.before[low])
    return path[::-1]


class _WaitingChunk(Struct):
    """A chunk that others see, and what is in memory with it."""

    chunk: Chunk
    bytes_before: float  # bytes of what waits before it
    tokens: int  # that ever waited from it on, itself included
    bytes: float  # of these, with all their activations


def choose_kept_chunks(chunks: Iterable[Chunk], budget: MemoryBudget) -> MemoryNeed:
    """Decides which chunks are kept: those from which on, themselves included, no more than `kept_tokens` wait at any
    time, and for whose activations there is room beside all that waits before them. What is done with at once is no
    larger if it is kept."""
    waiting: list[_WaitingChunk] = []
    most_bytes, most_tokens = 0.0, 0
    for chunk in chunks:
        before = waiting[-1].bytes_before + budget.waiting_bytes(waiting[-1].chunk) if waiting else 0.0
        own = budget.active_bytes(chunk)
        waiting.append(_WaitingChunk(chunk, before, len(chunk), own))
        while waiting and waiting[-1].chunk.last_use <= chunk.stop:
            ended = waiting.pop()
            own = budget.active_bytes(ended.chunk)
            fits = ended.bytes == own or ended.bytes_before + ended.bytes <= budget.max_bytes
            ended.chunk.is_kept = fits and ended.tokens <= budget.kept_tokens
            most_bytes = max(most_bytes, ended.bytes_before + (ended.bytes if ended.chunk.is_kept else own))
            most_tokens = max(most_tokens, ended.tokens if ended.chunk.is_kept else 0)
            if waiting:
                last = waiting[-1]
                last.tokens = max(last.tokens, len(last.chunk) + ended.tokens)
                last.bytes = max(last.bytes, budget.active_bytes(last.chunk) + ended.bytes)
    return MemoryNeed(most_bytes, most_tokens)


class ChunkPlan(Struct):
    chunks: list[Chunk]
    need: MemoryNeed


class Chunker:
    """Cuts forests for one model. What ran out of memory is cut again with less kept, and so is whatever follows it."""

    def __init__(self, chunk_tokens: int, budget: MemoryBudget) -> None:
        self._max_chunk_tokens = chunk_tokens
        self._budget = budget
        self._kept_share = 1.0  # of what the budget lets be kept
        self._halvings = 0  # of chunks

    @property
    def chunk_tokens(self) -> int:
        return self._max_chunk_tokens >> self._halvings

    def plan(self, forest: Forest, *, training: bool) -> ChunkPlan:
        """Where nothing trains, no activations are kept."""
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
        chunks = split_into_chunks(forest, self.chunk_tokens, budget)
        need = choose_kept_chunks(chunks, budget)
        if training and self._kept_share < 1:  # of the same chunks: so the gradient is the same, too
            most = max(self.chunk_tokens, int(self._kept_share * need.kept_tokens))
            need = choose_kept_chunks(chunks, replace(budget, kept_tokens=min(budget.kept_tokens, most)))
        return ChunkPlan(chunks, need)

    def keep_less(self, forest: Forest, *, training: bool) -> str | None:
        """From now on: half of what was kept, then no more than one chunk, then shorter chunks. Says what it is now;
        None where no less is possible for this forest."""
        before = self.plan(forest, training=training)
        while self._reduce(training):
            now = self.plan(forest, training=training)
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

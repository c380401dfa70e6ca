"""A forest cut into pieces that go through a model one after the other.

A chunk is an interval of the packed tokens. What its tokens see before it is the path to its first token: all of it has
gone through the model already, and its keys and values are still there. Going backwards, a chunk's turn comes when all
that sees it has been done; what came back to its keys and values by then is part of its gradient. So the gradient is
exact wherever the cuts are.

A chunk whose activations are kept goes through the model once; the others twice, like a checkpoint. Kept are the ends
of paths, as many tokens as may be: what lies below a branching is entered often, and left soon.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct

from polar.train.forest import Forest, Indices
from polar.trajectory.tree import ROOT


class Chunk(Struct):
    """Packed tokens `start` to `stop`."""

    start: int
    stop: int
    context: list[tuple[int, int]]  # the path to its first token, as intervals of packed tokens
    needed: int  # up to this packed token others see it
    whole: int  # tokens of its context, from its beginning on, that all of it sees
    one_path: bool
    kept: bool = True  # its activations are, until its backward pass

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def depth(self) -> int:
        """Tokens of its context."""
        return sum(stop - start for start, stop in self.context)

    @property
    def plain(self) -> bool:
        """It is one path, and all of it sees all of its context."""
        return self.one_path and self.whole == self.depth


class _Way(Struct):
    """What can be done one way or the other."""

    few: int
    """So many tokens go with a long part of their path, before them or behind: if it is behind them, it waits with them
    for whatever else branches off there."""
    piece: int
    """Long parts that wait for others are cut into such pieces: of several, some may be kept."""


def cut(forest: Forest, chunk_tokens: int, kept_tokens: int) -> list[Chunk]:
    """Chunks of `chunk_tokens` at most."""
    if not len(forest):
        return []
    parts = list(_parts(forest, chunk_tokens))
    runs = _runs(forest)

    def chunks(way: _Way) -> list[Chunk]:
        made = [_chunk(forest, runs, start, stop) for start, stop in _intervals(forest, parts, chunk_tokens, way)]
        _keep(made, kept_tokens)
        return made

    def cost(chunks: list[Chunk]) -> float:
        """In tokens: a forward pass is a third of all, and a short chunk takes as long as a longer one (see CHUNK in
        fitting.py)."""
        return sum(max(len(chunk), chunk_tokens / 5) * (1 if chunk.kept else 4 / 3) for chunk in chunks)

    pieces = chunk_tokens, max(1, chunk_tokens // 2)
    ways = [_Way(few, piece) for few in (chunk_tokens // 8, chunk_tokens // 16, 0) for piece in pieces]
    return min(map(chunks, ways), key=cost)


def _stretches(forest: Forest) -> Indices:
    """Where stretches begin: tokens of one path, all of which the same tokens see."""
    follows = forest.before[1:] == np.arange(len(forest) - 1)
    same = forest.ends[1:] == forest.ends[:-1]
    return np.concatenate([[0], np.flatnonzero(~(follows & same)) + 1])


def _runs(forest: Forest) -> Indices:
    """Of each token, the first one from which on packed tokens follow each other on its path, up to it."""
    places = np.arange(len(forest))
    found: Indices = np.maximum.accumulate(np.where(forest.before == places - 1, 0, places))
    return found


class _Part(Struct):
    """Tokens that are cut only if they are one path. `end` is where the subtree ends that begins with them."""

    start: int
    stop: int
    end: int
    long: bool

    @property
    def waits(self) -> bool:
        """For others, that see it."""
        return self.stop < self.end


def _parts(forest: Forest, most: int) -> Iterator[_Part]:
    """Whole subtrees where they fit: a chunk of such is done with at once, and what waits for others takes memory, or
    goes through twice. But long stretches of one path are parts by themselves: attention is quickest there."""
    stretches = _stretches(forest)
    edges = [*stretches.tolist(), len(forest)]
    lengths = np.diff(edges)
    long = max(1, most // 4)
    long_ones = [*np.flatnonzero(lengths >= long).tolist(), len(stretches)]
    number = 0
    while number < len(stretches):
        start, end = edges[number], int(forest.ends[edges[number]])
        behind = int(np.searchsorted(stretches, end))
        if end - start > most or long_ones[bisect_left(long_ones, number)] < behind:
            behind = number + 1
        # What branches is no quicker by itself.
        least = long if behind == number + 1 else max(1, most // 2)
        yield _Part(start, edges[behind], end, long=edges[behind] - start >= least)
        number = behind


def _intervals(forest: Forest, parts: Iterable[_Part], most: int, way: _Way) -> list[tuple[int, int]]:
    """A long part is a chunk by itself, or with few tokens of its path; short ones go together."""
    chunks: list[tuple[int, int]] = []
    grows = False  # the last of them, if it is of short parts
    edge = 0  # where the last long part ended
    for part in parts:
        start, stop = part.start, part.stop
        first, last = chunks[-1] if chunks else (0, 0)
        fits = bool(chunks) and stop - first <= most
        if not part.long:
            # What waits, and hangs beside the last chunk or above it, would make that wait as well.
            if grows:
                joins = last - first <= way.few or not part.waits or bool(forest.before[start] > forest.before[first])
            else:
                joins = part.waits and stop - edge <= way.few and _one_path(forest, last - 1, stop)
            if fits and joins:
                chunks[-1] = (first, stop)
            else:
                chunks.append((start, stop))
                grows = True
            continue
        if grows and fits and last - first <= way.few and _one_path(forest, first, stop):
            chunks[-1] = (first, stop)
        elif part.waits or stop - start > most:
            chunks += pairwise([start, *_cuts(start, stop, way.piece), stop])
        else:
            chunks.append((start, stop))
        grows, edge = False, stop
    return chunks


def _cuts(start: int, stop: int, most: int) -> list[int]:
    """Pieces as long as they may be, and some half as long, so that none is short, and lengths are few: attention's
    kernels want that (see flash.py)."""
    cuts = []
    while stop - start > most:
        start += most if 2 * (stop - start) >= 3 * most else max(1, most // 2)
        cuts.append(start)
    return cuts


def _chunk(forest: Forest, runs: Indices, start: int, stop: int) -> Chunk:
    context = _path(forest, runs, int(forest.before[start]))
    whole = sum(int((forest.ends[low:high] >= stop).sum()) for low, high in context)  # a path's ends never grow
    needed = int(forest.ends[start:stop].max())
    return Chunk(
        start=start,
        stop=stop,
        context=context,
        needed=max(needed, stop),
        whole=whole,
        one_path=_one_path(forest, start, stop),
    )


def _one_path(forest: Forest, start: int, stop: int) -> bool:
    return bool((forest.before[start + 1 : stop] == np.arange(start, stop - 1)).all())


def _path(forest: Forest, runs: Indices, token: int) -> list[tuple[int, int]]:
    """The path that ends with a token, as intervals of packed tokens."""
    path: list[tuple[int, int]] = []
    while token != ROOT:
        low = int(runs[token])
        path.append((low, token + 1))
        token = int(forest.before[low])
    return path[::-1]


def _keep(chunks: list[Chunk], budget: int) -> None:
    """Kept are those from which on, themselves included, no more than `budget` tokens wait at any time."""
    waiting: list[list[int]] = []  # number, tokens that wait before it, and the most that ever did with it
    for number, chunk in enumerate(chunks):
        before = waiting[-1][1] + len(chunks[waiting[-1][0]]) if waiting else 0
        waiting.append([number, before, before + len(chunk)])
        while waiting and chunks[waiting[-1][0]].needed <= chunk.stop:
            ended, before, most = waiting.pop()
            chunks[ended].kept = most - before <= budget
            if waiting:
                waiting[-1][2] = max(waiting[-1][2], most)

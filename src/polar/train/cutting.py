"""A forest cut into pieces that go through a model one after the other.

A chunk is an interval of the packed tokens. What its tokens see before it is the path to its first token: all of it has
gone through the model already, and its keys and values are still there. Going backwards, a chunk's turn comes when all
that sees it has been done; what came back to its keys and values by then is part of its gradient. So the gradient is
exact wherever the cuts are.

A chunk whose activations are kept goes through the model once; the others twice, like a checkpoint. Kept are the ends
of paths, as many tokens as may be: what lies below a branching is entered often, and left soon.
"""

from collections.abc import Iterator
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


def cut(forest: Forest, chunk_tokens: int, kept_tokens: int) -> list[Chunk]:
    """Chunks of `chunk_tokens` at most."""
    if not len(forest):
        return []
    stretches = _stretches(forest)
    few = chunk_tokens // 16

    def cost(chunks: list[Chunk]) -> float:
        """In tokens: a forward pass is a third of all, and a chunk costs something however short it is."""
        return sum(len(chunk) for chunk in chunks if not chunk.kept) / 3 + len(chunks) * few

    # Few tokens before a branching, and the branch behind them: as one chunk they wait for the other branches together.
    ways = (_cut(forest, stretches, chunk_tokens, kept_tokens, together=most) for most in (few, 0))
    return min(ways, key=cost)


def _cut(forest: Forest, stretches: Indices, chunk_tokens: int, kept_tokens: int, together: int) -> list[Chunk]:
    intervals = _intervals(forest, stretches, chunk_tokens, together)
    chunks = [_chunk(forest, stretches, start, stop) for start, stop in intervals]
    _keep(chunks, kept_tokens)
    return chunks


def _stretches(forest: Forest) -> Indices:
    """Where stretches begin: tokens of one path, all of which the same tokens see."""
    follows = forest.before[1:] == np.arange(len(forest) - 1)
    same = forest.ends[1:] == forest.ends[:-1]
    return np.concatenate([[0], np.flatnonzero(~(follows & same)) + 1])


def _intervals(forest: Forest, stretches: Indices, most: int, few: int) -> list[tuple[int, int]]:
    """A long part is a chunk by itself, or with `few` tokens of its path on either side; short ones go together."""
    long = max(1, most // 4)
    chunks: list[tuple[int, int]] = []
    grows = False  # the last of them, if it is of short parts
    edge = 0  # where the last long part ended
    for start, stop, end in _parts(forest, stretches, most, long):
        first, last = chunks[-1] if chunks else (0, 0)
        fits = bool(chunks) and stop - first <= most
        waits = stop < end  # for others that see it
        if stop - start < long:
            # What waits, and hangs beside the last chunk or above it, would make that wait as well.
            if grows:
                joins = last - first <= few or not waits or bool(forest.before[start] > forest.before[first])
            else:
                joins = waits and stop - edge <= few and _one_path(forest, last - 1, stop)
            if fits and joins:
                chunks[-1] = (first, stop)
            else:
                chunks.append((start, stop))
                grows = True
            continue
        if grows and fits and last - first <= few and _one_path(forest, first, stop):
            chunks[-1] = (first, stop)
        elif waits or stop - start > most:  # some of it may be kept, while the rest of its subtree goes through
            chunks += pairwise([start, *_cuts(start, stop, max(1, most // 2)), stop])
        else:
            chunks.append((start, stop))
        grows, edge = False, stop
    return chunks


def _parts(forest: Forest, stretches: Indices, most: int, long: int) -> Iterator[tuple[int, int, int]]:
    """From where, up to where, and where the subtree ends that begins there. Parts are whole subtrees where they fit: a
    chunk of such is done with at once, and what waits for others takes memory, or goes through twice. But long
    stretches of one path are parts by themselves: attention is quickest there."""
    edges = [*stretches.tolist(), len(forest)]
    lengths = np.diff(edges)
    number = 0
    while number < len(stretches):
        start, end = edges[number], int(forest.ends[edges[number]])
        behind = int(np.searchsorted(stretches, end))
        if end - start > most or lengths[number:behind].max() >= long:
            behind = number + 1
        yield start, edges[behind], end
        number = behind


def _cuts(start: int, stop: int, most: int) -> list[int]:
    """Pieces as long as they may be, and some half as long, so that none is short, and lengths are few: attention's
    kernels want that (see flash.py)."""
    cuts = []
    while stop - start > most:
        start += most if 2 * (stop - start) >= 3 * most else max(1, most // 2)
        cuts.append(start)
    return cuts


def _chunk(forest: Forest, stretches: Indices, start: int, stop: int) -> Chunk:
    context = _path(forest, stretches, int(forest.before[start]))
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


def _path(forest: Forest, stretches: Indices, token: int) -> list[tuple[int, int]]:
    """The path that ends with a token, as intervals of packed tokens."""
    path: list[tuple[int, int]] = []
    while token != ROOT:
        low = int(stretches[np.searchsorted(stretches, token, "right") - 1])
        if path and path[-1][0] == token + 1:
            path[-1] = (low, path[-1][1])
        else:
            path.append((low, token + 1))
        token = int(forest.before[low])
    return path[::-1]


def _keep(chunks: list[Chunk], budget: int) -> None:
    """Kept are those from which on, themselves included, no more than `budget` tokens wait at any time."""
    most = [0] * len(chunks)
    waiting: list[int] = []
    for number, chunk in enumerate(chunks):
        waiting.append(number)
        tokens = 0
        for one in reversed(waiting):
            tokens += len(chunks[one])
            most[one] = max(most[one], tokens)
        while waiting and chunks[waiting[-1]].needed <= chunk.stop:
            waiting.pop()
    for chunk, tokens in zip(chunks, most, strict=True):
        chunk.kept = tokens <= budget

"""The token tree: every exchange of a session, or of a whole group of sessions, with each shared prefix once.

It is a radix tree over token ids. A path goes in whole, prompt and sampled tokens, and nothing says what its parent is:
where two paths part is found by comparing them. Nodes hold ids only, as views on the paths' own arrays; a node ends
where paths part, or where the last one on it ends, and nowhere else. What was sampled is a matter of paths, not of
nodes (see `TokenTree.stretches`), since several samplings may have produced the same token.

Images have the same placeholders whatever they show, so they are compared by a key: at its first placeholder an image
stands for a negative number, of its own for each digest.

Building takes linear time, at about the speed of memory. A path is compared with the one before it, in blocks. Where
they part, the comparison goes on with a path of the branch that the new one takes, and each comparison runs as far as
the two agree, across nodes: a turn that extends an earlier one costs one or two of them, however many nodes it crosses.

Invariant: the same paths give the same tree, whatever their order. Nodes are numbered depth first, children by their
first key.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from polar.records.exchange import TokenIds
from polar.records.trajectory import ROOT, TokenPath

_FIRST_BLOCK_TOKENS, _MAX_BLOCK_TOKENS = 256, 32 * 1024
"""Tokens compared at once: few at first, where paths part most often, then as many as the processor's cache likes."""


class Node(Struct, frozen=True, gc=False):
    """Tokens `start` to `stop` of path `path`, and of each other path that crosses it."""

    parent: int
    path: int
    start: int
    stop: int


class NodeSpan(Struct, frozen=True, gc=False):
    """Tokens `start` to `stop` of a node's ids were sampled by a path, from its sampled token `offset` on."""

    path: int
    node: int
    start: int
    stop: int
    offset: int


class TokenTree(Struct):
    """Made by `build_token_tree`. Parents stand before their children."""

    paths: tuple[TokenPath, ...]
    nodes: list[Node]
    ends: list[int]  # the node that each path ends in

    @property
    def num_tokens(self) -> int:
        """The number of unique tokens."""
        return sum(node.stop - node.start for node in self.nodes)

    def get_ids(self, number: int) -> TokenIds:
        """Returns a node's token ids, as a view if they are in one array of its path."""
        node = self.nodes[number]
        path = self.paths[node.path]
        context = len(path.prompt)
        if node.stop <= context:
            return path.prompt[node.start : node.stop]
        if node.start >= context:
            return path.sampled[node.start - context : node.stop - context]
        return np.concatenate([path.prompt[node.start :], path.sampled[: node.stop - context]])

    def find_node(self, path: int, depth: int) -> int:
        """Returns the node that has the last of a path's first `depth` tokens."""
        number = self.ends[path]
        while number != ROOT and self.nodes[number].start >= depth:
            number = self.nodes[number].parent
        return number

    def list_sampled_spans(self, path: int) -> list[NodeSpan]:
        """Lists the spans of a path's sampled tokens, from first to last."""
        context = len(self.paths[path].prompt)
        end = context + len(self.paths[path].sampled)
        spans = []
        number = self.ends[path]
        while number != ROOT and (node := self.nodes[number]).stop > context:
            start, stop = max(node.start, context), min(node.stop, end)
            if start < stop:
                spans.append(NodeSpan(path, number, start - node.start, stop - node.start, start - context))
            number = node.parent
        return spans[::-1]


def build_token_tree(paths: Sequence[TokenPath]) -> TokenTree:
    """Builds the tree of paths, which may be of several sessions."""
    builder = _TreeBuilder(_make_key_sequences(paths))
    for index in range(len(paths)):
        builder.add(index)
    return TokenTree(tuple(paths), builder.number_nodes(), builder.find_end_nodes())


# What is compared


class _KeySequence:
    """A path's keys, in the two arrays that they come in."""

    __slots__ = ("context", "length", "prompt", "sampled")

    def __init__(self, prompt: TokenIds, sampled: TokenIds) -> None:
        self.prompt = prompt
        self.sampled = sampled
        self.context = len(prompt)
        self.length = len(prompt) + len(sampled)

    def get_key(self, at: int) -> int:
        return self.prompt.item(at) if at < self.context else self.sampled.item(at - self.context)

    def get_array_from(self, at: int) -> TokenIds:
        """Returns the keys from `at` to the end of the array that it is in."""
        return self.prompt[at:] if at < self.context else self.sampled[at - self.context :]


def _make_key_sequences(paths: Sequence[TokenPath]) -> list[_KeySequence]:
    """Makes the keys of paths. Ids are keys already; in a prompt with images, the keys of the images replace their
    first placeholders. Images with the same placeholder and digest have the same key. Keys are numbered in sorted
    order, so that they don't depend on the order of the paths."""
    images = {image for path in paths if path.images for image in _collect_image_keys(path).values()}
    numbers = {image: index - len(images) for index, image in enumerate(sorted(images))}
    sequences = []
    for path in paths:
        prompt = path.prompt
        if path.images:
            prompt = prompt.copy()
            for position, image in _collect_image_keys(path).items():
                prompt[position] = numbers[image]
        sequences.append(_KeySequence(prompt, path.sampled))
    return sequences


def _collect_image_keys(path: TokenPath) -> dict[int, tuple[int, tuple[bytes, ...]]]:
    """Collects by position the placeholder's id and the digests of the images there (several if an image has no
    placeholders of its own)."""
    digests: dict[int, tuple[bytes, ...]] = {}
    for image in path.images:
        digests[image.position] = (*digests.get(image.position, ()), image.digest)
    return {position: (path.prompt.item(position), image_digests) for position, image_digests in digests.items()}


def _extend_common_length(left: _KeySequence, right: _KeySequence, at: int) -> int:
    """Returns how long the common prefix of two sequences is, which are equal up to `at`."""
    stop = min(left.length, right.length)
    while at < stop:
        left_keys, right_keys = left.get_array_from(at), right.get_array_from(at)
        shared = _count_common_prefix(left_keys, right_keys)
        at += shared
        if shared < min(len(left_keys), len(right_keys)):
            break
    return at


def _count_common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Returns the length of the longest common prefix."""
    size = min(len(left), len(right))
    at, block = 0, _FIRST_BLOCK_TOKENS
    while at < size:
        stop = min(at + block, size)
        differs = left[at:stop] != right[at:stop]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at, block = stop, min(4 * block, _MAX_BLOCK_TOKENS)
    return size


# How the tree grows


class _Branch:
    """A node while the tree grows: as `Node`, with its children by their first key."""

    __slots__ = ("children", "number", "parent", "path", "start", "stop")

    def __init__(self, parent: "_Branch | None", path: int, start: int, stop: int) -> None:
        self.parent = parent
        self.path = path
        self.start = start
        self.stop = stop
        self.children: dict[int, _Branch] = {}
        self.number = ROOT


class _TreeBuilder:
    def __init__(self, lines: list[_KeySequence]) -> None:
        self._sequences = lines
        self._root = _Branch(None, ROOT, 0, 0)
        # The branch that each path ended in when it was added. Where that one was split since, it is the lower part,
        # and the path may end above it.
        self._end_branches: list[_Branch] = []

    def add(self, index: int) -> None:
        line = self._sequences[index]
        branch, at = self._follow_last(line)
        while at < line.length:
            # The tree has the line's first `at` keys, the last of them in `branch`.
            key = line.get_key(at)
            if at < branch.stop:
                if self._sequences[branch.path].get_key(at) != key:
                    branch = self._add_leaf(self._split(branch, at, index), index, at)
                    break
            elif (child := branch.children.get(key)) is not None:
                branch = child
            elif branch.children or branch is self._root:
                branch = self._add_leaf(branch, index, at)
                break
            else:  # a leaf grows
                branch.path, branch.stop = index, line.length
                break
            entered = branch
            at = _extend_common_length(line, self._sequences[branch.path], at + 1)
            while branch.stop < at:
                branch = branch.children[line.get_key(branch.stop)]
            if entered.stop <= at:
                entered.path = index  # what comes next here is likely to resemble what came last
        self._end_branches.append(branch)

    def _follow_last(self, line: _KeySequence) -> tuple[_Branch, int]:
        """How far a line goes along with the one that was added last, and the branch that this is in."""
        if not self._end_branches:
            return self._root, 0
        branch = self._end_branches[-1]
        at = _extend_common_length(line, self._sequences[len(self._end_branches) - 1], 0)
        while branch.parent is not None and branch.start >= at:
            branch = branch.parent
        return branch, at

    def _add_leaf(self, parent: _Branch, index: int, at: int) -> _Branch:
        line = self._sequences[index]
        leaf = _Branch(parent, index, at, line.length)
        parent.children[line.get_key(at)] = leaf
        return leaf

    def _split(self, lower: _Branch, at: int, index: int) -> _Branch:
        """Cuts a branch in two before `at`; path `index` crosses the upper part, which is a new one."""
        above = lower.parent
        assert above is not None  # the root is empty
        upper = _Branch(above, index, lower.start, at)
        above.children[self._sequences[index].get_key(lower.start)] = upper
        upper.children[self._sequences[lower.path].get_key(at)] = lower
        lower.parent, lower.start = upper, at
        return upper

    def number_nodes(self) -> list[Node]:
        nodes: list[Node] = []
        waiting = _list_children_reversed(self._root)
        while waiting:
            branch = waiting.pop()
            branch.number = len(nodes)
            assert branch.parent is not None
            nodes.append(Node(branch.parent.number, branch.path, branch.start, branch.stop))
            waiting.extend(_list_children_reversed(branch))
        return nodes

    def find_end_nodes(self) -> list[int]:
        """The longest paths first, so that each branch's way up is walked once for all the paths that ended in it."""
        ends = [ROOT] * len(self._sequences)
        above: dict[_Branch, _Branch] = {}
        for index in sorted(range(len(ends)), key=lambda it: -self._sequences[it].length):
            ended = self._end_branches[index]
            branch = above.get(ended, ended)
            while branch.parent is not None and branch.start >= self._sequences[index].length:
                branch = branch.parent
            above[ended] = branch
            ends[index] = branch.number
        return ends


def _list_children_reversed(branch: _Branch) -> list[_Branch]:
    return [branch.children[key] for key in sorted(branch.children, reverse=True)]

"""Trees to train on: random ones, and those of groups of every kind of session."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from polar.records.trajectory import ROOT, SessionPaths, TokenPath
from polar.testing.token_paths import make_path, make_session_paths
from polar.train.packing import TokenTree
from polar.trajectory.builders import prefix_tree

VOCABULARY = 90


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Of any shape, also with empty nodes, several roots, and tokens that are asked for more than once."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=10))
    parents = [ROOT, *(draw(st.integers(ROOT, node - 1)) for node in range(1, len(lengths)))]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = rng.integers(0, VOCABULARY, starts[-1]).astype(np.int32)
    made = TokenTree(ids, starts, np.array(parents, np.int32), np.empty(0, np.int64), np.empty(0, np.float32))
    behind = [token for token in range(len(ids)) if len(before(made, token))]
    tokens = draw(st.lists(st.sampled_from(behind), max_size=20)) if behind else []
    made.tokens = np.array(tokens, np.int64)
    made.temperature = rng.choice([0.7, 1.0], len(tokens)).astype(np.float32)
    return made


def before(tree: TokenTree, token: int) -> list[int]:
    """The tokens (indices into `ids`) before one on its path."""
    node = int(np.searchsorted(tree.starts, token, "right")) - 1
    found = list(range(tree.starts[node], token))
    while (node := int(tree.parents[node])) != ROOT:
        found = [*range(tree.starts[node], tree.starts[node + 1]), *found]
    return found


# Groups


class Script:
    """Writes sessions: text that is the same for the same name, and samples that never are."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.paths: list[TokenPath] = []
        self._rng = np.random.default_rng(seed)

    def text(self, name: str, length: int = 9) -> list[int]:
        rng = np.random.default_rng(list(name.encode()))
        return rng.integers(0, VOCABULARY, length).tolist()

    def call(self, prompt: Sequence[int], length: int = 6, *, agent: str | None = None) -> list[int]:
        """What was sampled."""
        sampled = self._rng.integers(0, VOCABULARY, length).tolist()
        self.paths.append(make_path(len(self.paths), prompt, sampled, session_id=self.name, agent_id=agent, scale=1.0))
        return sampled


def linear(script: Script) -> None:
    history = script.text("system", 20)
    for turn in range(3):
        history = [*history, *script.call(history), *script.text(f"{script.name} result {turn}")]


def forked(script: Script) -> None:
    """Two answers to the same prompt, and both go on."""
    system = script.text("system", 20)
    for branch in range(2):
        history = [*system, *script.call(system), *script.text(f"{script.name} branch {branch}")]
        script.call(history)


def compacted(script: Script) -> None:
    linear(script)
    summary = script.call([*script.paths[-1].prompt.tolist(), *script.text("summarise")])
    script.call([*script.text("system", 20), *summary, *script.text("go on")])


def subagents(script: Script) -> None:
    linear(script)
    for number in range(2):
        history = [*script.text("you are a helper", 15), *script.text(f"errand {number}")]
        script.call([*history, *script.call(history, agent=str(number))], agent=str(number))
    linear(script)


def think_stripped(script: Script) -> None:
    """Each turn thinks, and the next prompt has only what it said in the end."""
    history = script.text("system", 20)
    for turn in range(4):
        sampled = script.call(history, 10)
        history = [*history, *sampled[6:], *script.text(f"{script.name} result {turn}")]


KINDS: dict[str, Callable[[Script], None]] = {
    kind.__name__: kind for kind in (linear, forked, compacted, subagents, think_stripped)
}


def group(kind: str, count: int = 3) -> list[SessionPaths]:
    scripts = [Script(f"s{number}", number) for number in range(count)]
    for script in scripts:
        KINDS[kind](script)
    return [make_session_paths(*script.paths) for script in scripts]


def group_tree(sessions: Sequence[SessionPaths]) -> tuple[TokenTree, list[tuple[str, int]]]:
    """The group's tree, and what its entries are: whose sampled token, and which."""
    built = prefix_tree(sessions)
    tokens, entries = [], []
    for term in built.terms:
        for number in range(term.stop - term.start):
            tokens.append(built.starts[term.node] + term.start + number)
            entries.append((term.exchange_id, term.offset + number))
    tree = TokenTree(
        built.ids, built.starts, built.parents, np.array(tokens, np.int64), np.ones(len(tokens), np.float32)
    )
    return tree, entries

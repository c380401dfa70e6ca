"""Whether a model says the same over trees as by itself.

Models differ in what they do to scores and logits, and in what they hand on to an attention that isn't theirs. So each
one is tried, on a small fork: two sequences that begin alike.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar.errors import ConfigError
from polar.train.forest import Forest, Tree, forest
from polar.trajectory.tree import ROOT

_TRUNK, _BRANCH = 7, 5  # tokens
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 0.1  # of half precision: in the mean, so that a mistake is more than that


def fork(model: Any) -> Forest:
    """All of its tokens are asked for."""
    vocabulary = model.get_input_embeddings().num_embeddings
    starts = np.array([0, _TRUNK, _TRUNK + _BRANCH, _TRUNK + 2 * _BRANCH], np.int64)
    ids = np.random.default_rng(0).integers(0, vocabulary, starts[-1]).astype(np.int32)
    tokens = np.arange(1, len(ids), dtype=np.int64)
    return forest([Tree(ids, starts, np.array([ROOT, 0, 0], np.int32), tokens, np.ones(len(tokens), np.float32))])


@torch.no_grad()
def by_itself(model: Any) -> Tensor:
    """The log-probabilities of the fork's terms, branch by branch, by the model as it is."""
    packed = fork(model)
    ids = torch.from_numpy(packed.ids).long().to(model.device)
    found = torch.empty(len(ids) - 1)
    for start in (_TRUNK, _TRUNK + _BRANCH):
        path = [*range(_TRUNK), *range(start, start + _BRANCH)]
        logprobs = model(input_ids=ids[path][None], use_cache=False).logits[0].float().log_softmax(-1)
        for place in range(1, len(path)):
            found[path[place] - 1] = logprobs[place - 1, ids[path[place]]].cpu()
    return found


def check(model: Any, over_tree: Tensor, by_itself: Tensor) -> None:
    """Raises ConfigError where they differ."""
    difference = float((over_tree.float().cpu() - by_itself).abs().mean())
    if not difference <= _TOLERANCE.get(model.dtype, _COARSE):
        raise ConfigError(
            f"{type(model).__name__} does something to its scores or logits that is not known here: over a tree its "
            f"log-probabilities are off by {difference:.2g}."
        )

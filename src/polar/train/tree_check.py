"""Whether a model says the same over trees as by itself.

Models differ in what they do to scores and logits, and in what they hand on to an attention that isn't theirs. So each
one is tried, on a small fork: two sequences that begin alike.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar.errors import ConfigError
from polar.records.trajectory import ROOT
from polar.train.forest import Forest, TokenTree, pack_forest

_TRUNK_TOKENS, _BRANCH_TOKENS = 7, 5  # tokens
_TOLERANCE_BY_DTYPE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 0.1  # of half precision: in the mean, so that a mistake is more than that


def make_fork(model: Any) -> Forest:
    """All of its tokens are asked for."""
    vocabulary = model.get_input_embeddings().num_embeddings
    starts = np.array([0, _TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS, _TRUNK_TOKENS + 2 * _BRANCH_TOKENS], np.int64)
    ids = np.random.default_rng(0).integers(0, vocabulary, starts[-1]).astype(np.int32)
    tokens = np.arange(1, len(ids), dtype=np.int64)
    return pack_forest(
        [TokenTree(ids, starts, np.array([ROOT, 0, 0], np.int32), tokens, np.ones(len(tokens), np.float32))]
    )


@torch.no_grad()
def compute_reference_logprobs(model: Any) -> Tensor:
    """The log-probabilities of the fork's terms, branch by branch, by the model as it is."""
    packed = make_fork(model)
    ids = torch.from_numpy(packed.ids).long().to(model.device)
    found = torch.empty(len(ids) - 1)
    for start in (_TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS):
        path = [*range(_TRUNK_TOKENS), *range(start, start + _BRANCH_TOKENS)]
        logprobs = model(input_ids=ids[path][None], use_cache=False).logits[0].float().log_softmax(-1)
        for place in range(1, len(path)):
            found[path[place] - 1] = logprobs[place - 1, ids[path[place]]].cpu()
    return found


def check_tree_logprobs(model: Any, over_tree: Tensor, reference: Tensor) -> None:
    """Raises ConfigError where they differ."""
    difference = float((over_tree.float().cpu() - reference).abs().mean())
    if not difference <= _TOLERANCE_BY_DTYPE.get(model.dtype, _HALF_PRECISION_TOLERANCE):
        raise ConfigError(
            f"{type(model).__name__} does something to its scores or logits that is not known here: over a tree its "
            f"log-probabilities are off by {difference:.2g}."
        )

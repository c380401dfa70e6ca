"""Sequences through a model, one at a time: for models that can't run over trees, and to compare with those that can.

It has the interface of passes.TreeModel. A forest of paths costs what its tokens cost; one with branches, each path.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar.train.forest import Forest, Indices
from polar.train.logprobs import compute_chosen_logprobs
from polar.train.tree_model import LossFunction


class SequentialModel:
    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, forest: Forest) -> Tensor:
        found = torch.zeros(len(forest.terms), device=self._model.device)
        for path, terms in _iterate_paths(forest):
            found[self._entry_indices(forest, terms)] = self._score_path(forest, path, terms)
        return found

    def backward(self, forest: Forest, loss: LossFunction) -> Tensor:
        found = torch.zeros(len(forest.terms), device=self._model.device)
        for path, terms in _iterate_paths(forest):
            index = self._entry_indices(forest, terms)
            logprobs = self._score_path(forest, path, terms)
            found[index] = logprobs.detach()
            torch.autograd.backward(loss(index, logprobs))
        return found

    def keep_less(self, forest: Forest, *, training: bool) -> str | None:  # noqa: ARG002
        """A sequence goes through whole."""
        return None

    def _score_path(self, forest: Forest, path: Indices, terms: Indices) -> Tensor:
        device = self._model.device
        ids = torch.from_numpy(forest.ids[path]).long().to(device)
        places = torch.from_numpy(forest.depths[forest.terms.positions[terms]]).long().to(device)
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, places]
        temperature = torch.from_numpy(forest.terms.temperature[terms]).to(device)
        targets = torch.from_numpy(forest.terms.target[terms]).long().to(device)
        return compute_chosen_logprobs(logits, targets, temperature)

    def _entry_indices(self, forest: Forest, terms: Indices) -> Tensor:
        return torch.from_numpy(forest.terms.entry_indices[terms]).to(self._model.device)


def _iterate_paths(forest: Forest) -> Iterator[tuple[Indices, Indices]]:
    """Paths from a root to a leaf, and the terms that each is used for: every term once."""
    asked: dict[int, list[int]] = {}
    for term, at in enumerate(forest.terms.positions):
        asked.setdefault(int(at), []).append(term)
    leaves = np.setdiff1d(np.arange(len(forest)), forest.before)
    for leaf in leaves:
        path = []
        token = int(leaf)
        while token >= 0:
            path.append(token)
            token = int(forest.before[token])
        terms = [term for token in reversed(path) for term in asked.pop(token, ())]
        if terms:
            yield np.array(path[::-1], np.int64), np.array(terms, np.int64)

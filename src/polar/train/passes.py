"""Trees through a model: log-probabilities of what was sampled, and gradients, each token computed once.

    forest -> chunks -> the model's layers, with attention along paths -> logits where something was sampled -> loss

A chunk's keys and values stay until nothing behind it sees them any more. Chunks behind it are given them as if they
were inputs, and what comes back to them as gradients is added up; the chunk's own backward pass begins with that sum,
besides its own loss. This is the chain rule, so the gradient is that of the whole tree at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from polar.errors import ConfigError
from polar.train.attention import Sight
from polar.train.cutting import Chunk, cut
from polar.train.forest import Forest

LOGITS = 1024
"""Positions whose logits exist at the same time: a vocabulary is wide."""

_ATTENTION = "polar_tree"

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of some terms (their numbers, as they were given) and their log-probabilities: their part of the loss, a sum."""


class _Pass(Struct):
    """One chunk's way through the layers: what it sees, and what it leaves for those behind it."""

    chunk: Chunk
    sight: Sight
    context: list[tuple["_Pass", int, int]]  # where its context lies: tokens `start` to `stop` of earlier chunks
    hidden: Tensor | None = None  # at the positions that predict something
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of its own tokens
    values: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer, its context's, as inputs
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer, what came back to its own

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values with the context's in front."""
        self.keys[layer], self.values[layer] = key, value
        if not self.context:
            return key, value
        context = tuple(
            torch.cat([getattr(one, kind)[layer].detach()[:, :, start:stop] for one, start, stop in self.context], 2)
            for kind in ("keys", "values")
        )
        if torch.is_grad_enabled():
            for tensor in context:
                tensor.requires_grad_()
            self.seen[layer] = context[0], context[1]
        return torch.cat([context[0], key], 2), torch.cat([context[1], value], 2)

    def give_back(self) -> None:
        """Adds what came back to the context's keys and values to the chunks that they are from."""
        for layer, tensors in self.seen.items():
            at = 0
            for one, start, stop in self.context:
                for mine, theirs in zip(tensors, one.grad(layer), strict=True):
                    if mine.grad is not None:
                        theirs[:, :, start:stop] += mine.grad[:, :, at : at + stop - start]
                at += stop - start
        self.seen.clear()

    def grad(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self.grads:
            self.grads[layer] = torch.zeros_like(self.keys[layer]), torch.zeros_like(self.values[layer])
        return self.grads[layer]


class TreeModel:
    """A Hugging Face causal language model, over forests. It runs in the model's own type and on its device."""

    def __init__(self, model: Any, *, chunk_tokens: int = 8192, kept_tokens: int = 32768) -> None:
        """At most `chunk_tokens` go through at once; of at most `kept_tokens` are activations kept for the backward
        pass, while the rest goes through twice."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._device = next(self._model.parameters()).device
        self._decoder, self._head = _parts(self._model)
        self._chunk_tokens, self._kept_tokens = chunk_tokens, kept_tokens
        _use_tree_attention(self._model)

    @torch.no_grad()
    def logprobs(self, forest: Forest) -> Tensor:
        """Of each term, in the order in which they were given."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_Pass] = []
        for chunk in cut(forest, self._chunk_tokens, 0):
            one = self._begin(forest, chunk, waiting)
            self._forward(forest, one)
            for index, logits, targets in self._logits(forest, one):
                found[index] = _chosen(logits, targets)
            one.hidden = None
            _done(waiting, one)
        return found

    def backward(self, forest: Forest, loss: Loss) -> Tensor:
        """Adds the loss's gradient to the parameters'. Returns the log-probabilities, as `logprobs` does."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_Pass] = []
        for chunk in cut(forest, self._chunk_tokens, self._kept_tokens):
            one = self._begin(forest, chunk, waiting)
            with torch.set_grad_enabled(chunk.kept):
                self._forward(forest, one)
            for ended in _done(waiting, one):
                self._backward(forest, ended, loss, found)
        return found

    # One chunk

    def _begin(self, forest: Forest, chunk: Chunk, waiting: list[_Pass]) -> _Pass:
        context = []
        for start, stop in chunk.context:
            for one in waiting:
                low, high = max(start, one.chunk.start), min(stop, one.chunk.stop)
                if low < high:
                    context.append((one, low - one.chunk.start, high - one.chunk.start))
        return _Pass(chunk, Sight.of(forest, chunk, self._device), context)

    def _forward(self, forest: Forest, one: _Pass) -> None:
        chunk = one.chunk
        ids = torch.from_numpy(forest.ids[chunk.start : chunk.stop]).long().to(self._device)
        depths = torch.from_numpy(forest.depths[chunk.start : chunk.stop]).long().to(self._device)
        output = self._decoder(input_ids=ids[None], position_ids=depths[None], use_cache=False, tree=one)
        positions = np.unique(forest.terms.at[_terms(forest, chunk)]) - chunk.start
        one.hidden = output.last_hidden_state[0, torch.from_numpy(positions).to(self._device)]

    def _backward(self, forest: Forest, one: _Pass, loss: Loss, found: Tensor) -> None:
        if not one.chunk.kept:
            one.keys, one.values = {}, {}
            self._forward(forest, one)
        assert one.hidden is not None
        tensors: list[Tensor] = []
        grads: list[Tensor] = []
        if len(one.hidden):
            hidden, one.hidden = one.hidden, one.hidden.detach().requires_grad_()
            for index, logits, targets in self._logits(forest, one):
                logprobs = _chosen(logits, targets)
                found[index] = logprobs.detach()
                loss(index, logprobs).backward()
            tensors.append(hidden)
            grads.append(one.hidden.grad if one.hidden.grad is not None else torch.zeros_like(hidden))
        for layer, (key, value) in one.grads.items():
            tensors += [one.keys[layer], one.values[layer]]
            grads += [key, value]
        wanted = [(tensor, grad) for tensor, grad in zip(tensors, grads, strict=True) if tensor.requires_grad]
        if wanted:
            torch.autograd.backward([tensor for tensor, _ in wanted], [grad for _, grad in wanted])
        one.give_back()

    def _logits(self, forest: Forest, one: _Pass) -> Any:
        """Some terms at a time: their numbers, their logits, after the temperature, and their ids."""
        assert one.hidden is not None
        terms = forest.terms
        here = _terms(forest, one.chunk)
        positions, row = np.unique(terms.at[here], return_inverse=True)
        for start in range(0, len(positions), LOGITS):
            low, high = np.searchsorted(row, [start, start + LOGITS])
            logits = self._head(one.hidden[start : start + LOGITS])
            rows = torch.from_numpy(row[low:high] - start).to(self._device)
            some = slice(here.start + low, here.start + high)
            temperature = torch.from_numpy(terms.temperature[some]).to(self._device)
            yield (
                torch.from_numpy(terms.source[some]).to(self._device),
                (logits.float(), rows, temperature),
                torch.from_numpy(terms.target[some]).long().to(self._device),
            )


def _chosen(logits: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The log-probabilities of `targets`."""
    table, rows, temperature = logits
    scaled = table[rows] / temperature[:, None]
    return scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(1)


def _terms(forest: Forest, chunk: Chunk) -> slice:
    low, high = np.searchsorted(forest.terms.at, [chunk.start, chunk.stop])
    return slice(int(low), int(high))


def _done(waiting: list[_Pass], one: _Pass) -> list[_Pass]:
    """Those that nothing behind this chunk sees, the last one first."""
    waiting.append(one)
    ended = []
    while waiting and waiting[-1].chunk.needed <= one.chunk.stop:
        ended.append(waiting.pop())
    return ended


# The model


def _parts(model: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return decoder, head
    return decoder, lambda hidden: torch.tanh(head(hidden) / cap) * cap


def _use_tree_attention(model: Any) -> None:
    from transformers import AttentionInterface

    kinds = {*(getattr(model.config, "layer_types", None) or []), "full_attention"}
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"This model has layers of the kind {', '.join(sorted(unknown))}, which can't run over trees: "
            'set [rollout] builder = "prefix_merging".'
        )
    AttentionInterface.register(_ATTENTION, _tree_attention)
    model.set_attn_implementation(_ATTENTION)


def _tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: _Pass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention."""
    if tree is None:
        raise ConfigError(f"{type(module).__name__} does not hand on what its model is called with: it can't run trees.")
    if dropout:
        raise ConfigError("The model has dropout in its attention, which makes log-probabilities random: set it to 0.")
    keys, values = tree.extend(module.layer_idx, key, value)
    scale = module.head_dim**-0.5 if scaling is None else scaling
    return tree.sight.attend(query, keys, values, scale, sliding_window).transpose(1, 2).contiguous(), None

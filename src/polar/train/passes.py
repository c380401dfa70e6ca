"""Trees through a model: log-probabilities of what was sampled, and gradients, each token computed once.

    forest -> chunks -> the model's layers, with attention along paths -> logits where something was sampled -> loss

A chunk's keys and values stay until nothing behind it sees them any more. Chunks behind it are given them as if they
were inputs, and what comes back to them as gradients is added up; the chunk's own backward pass begins with that sum,
besides its own loss. This is the chain rule, so the gradient is that of the whole tree at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from polar.errors import ConfigError
from polar.train import checking, flash
from polar.train.attention import Sight
from polar.train.cutting import Chunk, Cutter
from polar.train.fitting import fit, grain
from polar.train.forest import Forest
from polar.train.fusing import compiling, fuse
from polar.train.logprobs import LOGITS, chosen
from polar.train.memory import release_pieces
from polar.train.moving import moved
from polar.train.recurrent import Recurrence, follow_trees

_ATTENTION = "polar_tree"

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of some terms (their numbers, as they were given) and their log-probabilities: their part of the loss, a sum."""


class _Pass(Struct):
    """One chunk's way through the layers: what it sees, and what it leaves for those behind it."""

    chunk: Chunk
    sight: Sight
    context: list["_Where"]
    grain: int  # of flash attention's lengths
    within: Sight | None = None  # without what all of the chunk sees of its context, where that is not everything
    recurrence: Recurrence | None = None  # where the model has recurrent layers
    hidden: Tensor | None = None  # at the positions that predict something
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of its own tokens
    values: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, tuple[Tensor, Tensor, list["_Where"]]] = field(default_factory=dict)
    """By layer, copies of its context's, as inputs, and where they are from."""
    key_grads: dict[int, Tensor] = field(default_factory=dict)  # by layer, what came back to its own
    value_grads: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.keys[layer], self.values[layer] = key, value
        if flash.takes(query) and self.sight.narrow(window) is None:
            if self.chunk.plain:
                pieces = self._pieces(layer, self.context)
                compiled = self.sight.compiled
                return flash.joined_attention(query, key, value, pieces, scale, grain=self.grain, compiled=compiled)
            if self.within is not None and self.within.flexible(query):
                whole, rest = _split(self.context, flash.round_part(self.chunk.whole, self.grain))
                own = self.within.attend_normalised(query, *self._extended(layer, key, value, rest), scale)
                pieces = self._pieces(layer, whole)
                return flash.extended_attention(query, *own, pieces, scale, grain=self.grain, compiled=True)
        return self.sight.attend(query, *self._extended(layer, key, value, self.context), scale, window)

    def _pieces(self, layer: int, context: list["_Where"]) -> list[flash.Piece]:
        """Keys and values where they are."""

        def piece(one: "_Pass", start: int, stop: int) -> flash.Piece:
            def give_back(low: int, high: int, key: Tensor, value: Tensor) -> None:
                one.give(layer, start + low, start + high, key, value)

            key, value = one.keys[layer].detach(), one.values[layer].detach()
            return flash.Piece(key[:, :, start:stop], value[:, :, start:stop], give_back)

        return [piece(*where) for where in context]

    def _extended(self, layer: int, key: Tensor, value: Tensor, context: list["_Where"]) -> tuple[Tensor, Tensor]:
        """A layer's keys and values with the context's in front, as if those were inputs."""
        if not context:
            return key, value
        pieces = self._pieces(layer, context)
        keys, values = torch.cat([one.key for one in pieces], 2), torch.cat([one.value for one in pieces], 2)
        if torch.is_grad_enabled():
            # What does not depend on anything that trains needs no gradient here, nor where it is from.
            self.seen[layer] = (
                keys.requires_grad_(key.requires_grad),
                values.requires_grad_(value.requires_grad),
                context,
            )
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def give_back(self) -> None:
        """What came back to copies of the context's keys and values goes to the chunks that they are from."""
        for layer, (keys, values, context) in self.seen.items():
            at = 0
            for one, start, stop in context:
                here = slice(at, at + stop - start)
                key, value = (None if copy.grad is None else copy.grad[:, :, here] for copy in (keys, values))
                one.give(layer, start, stop, key, value)
                at += stop - start
        self.seen.clear()

    def give(self, layer: int, start: int, stop: int, key: Tensor | None, value: Tensor | None) -> None:
        """Adds to the gradients of its own keys and values. In fp32: many branches may come back to one trunk."""
        _add(self.key_grads, layer, self.keys[layer], start, stop, key)
        _add(self.value_grads, layer, self.values[layer], start, stop, value)


_Where = tuple[_Pass, int, int]
"""Where some of a context lies: tokens `start` to `stop` of an earlier chunk."""


def _split(context: list[_Where], whole: int) -> tuple[list[_Where], list[_Where]]:
    """Its first `whole` tokens, and the rest."""
    first: list[_Where] = []
    rest: list[_Where] = []
    for one, start, stop in context:
        edge = start + min(whole, stop - start)
        whole -= edge - start
        if start < edge:
            first.append((one, start, edge))
        if edge < stop:
            rest.append((one, edge, stop))
    return first, rest


def _add(grads: dict[int, Tensor], layer: int, tensor: Tensor, start: int, stop: int, grad: Tensor | None) -> None:
    if grad is not None:
        if layer not in grads:
            grads[layer] = torch.zeros_like(tensor, dtype=torch.float32)
        grads[layer][:, :, start:stop] += grad


class TreeModel:
    """A Hugging Face causal language model, over forests. It runs in the model's own type and on its device.

    Raises ConfigError where the model does not say the same over trees as by itself; it is left as it was then."""

    def __init__(
        self,
        model: Any,
        *,
        chunk_tokens: int | None = None,
        kept_tokens: int | None = None,
        attention_grain: int | None = None,
        cutter: Cutter | None = None,
        compiled: bool = True,
    ) -> None:
        """At most `chunk_tokens` go through at once; of at most `kept_tokens` are activations kept for the backward
        pass, while the rest goes through twice. Default: as the machine's memory allows. `cutter` is another model's,
        whose chunks are wanted here. Lengths of attention's calls are multiples of `attention_grain`. Default: as
        flash.py has it for such a model. `compiled` is for CUDA alone: without it small models start sooner, and large
        ones are slow."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._device = next(self._model.parameters()).device
        self._decoder, self._head = _parts(self._model)
        self._compiled = compiled and self._device.type == "cuda"
        self._recurrent = follow_trees(self._decoder)
        self.attention_grain = attention_grain or grain(self._model)
        if cutter is None:
            sizes = fit(self._model, chunk_tokens, kept_tokens, grain=self.attention_grain, fused=self._compiled)
            cutter = Cutter(*sizes)
        self.cutter = cutter
        own = self._model.config._attn_implementation
        expected = checking.by_itself(self._model) if own != _ATTENTION else None
        _use_tree_attention(self._model)
        if expected is not None:
            try:
                checking.check(self._model, self.logprobs(checking.fork(self._model)), expected)
            except BaseException:
                self._model.set_attn_implementation(own)
                raise
        if self._compiled:
            fuse(self._model)

    @torch.no_grad()
    def logprobs(self, forest: Forest) -> Tensor:
        """Of each term, in the order in which they were given."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_Pass] = []
        with compiling():
            for chunk in self._cut(forest, training=False):
                waiting.append(self._begin(forest, chunk, waiting))
                self._forward(forest, waiting[-1])
                for index, logprobs in self._chosen(forest, waiting[-1]):
                    found[index] = logprobs
                waiting[-1].hidden = None
                while _is_done(waiting, chunk):
                    waiting.pop()
        return found

    def backward(self, forest: Forest, loss: Loss) -> Tensor:
        """Adds the loss's gradient to the parameters'. Returns the log-probabilities, as `logprobs` does.

        Where memory runs out, a part of the gradient has been added: it must be discarded."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_Pass] = []  # nobody else refers to them: what one holds is free when it has ended
        with compiling():
            for chunk in self._cut(forest, training=True):
                waiting.append(self._begin(forest, chunk, waiting))
                with torch.set_grad_enabled(chunk.kept):
                    self._forward(forest, waiting[-1])
                while _is_done(waiting, chunk):
                    self._backward(forest, waiting[-1], loss, found)
                    waiting.pop()
        return found

    def keep_less(self, forest: Forest, *, training: bool) -> str | None:
        """For what ran out of memory, and whatever follows it: says what is different now; None if nothing can be."""
        return self.cutter.keep_less(forest, training=training)

    def _cut(self, forest: Forest, *, training: bool) -> list[Chunk]:
        cut = self.cutter.cut(forest, training=training)
        release_pieces(self._device, cut.need.bytes)
        return cut.chunks

    # One chunk

    def _begin(self, forest: Forest, chunk: Chunk, waiting: list[_Pass]) -> _Pass:
        context = []
        for start, stop in chunk.context:
            for one in waiting:
                low, high = max(start, one.chunk.start), min(stop, one.chunk.stop)
                if low < high:
                    context.append((one, low - one.chunk.start, high - one.chunk.start))
        recurrence = None
        if self._recurrent:
            earlier = (one.recurrence for one in waiting if one.recurrence is not None)
            recurrence = Recurrence.of(forest, chunk, earlier, self._device)

        def sight(skip: int) -> Sight:
            return Sight.of(forest, chunk, self._device, compiled=self._compiled, skip=skip)

        whole = flash.round_part(chunk.whole, self.attention_grain)
        within = sight(whole) if whole and self._compiled else None
        return _Pass(chunk, sight(0), context, self.attention_grain, within, recurrence)

    def _forward(self, forest: Forest, one: _Pass) -> None:
        chunk = one.chunk
        ids = moved(forest.ids[chunk.start : chunk.stop], self._device).long()
        depths = moved(forest.depths[chunk.start : chunk.stop], self._device).long()
        output = self._decoder(input_ids=ids[None], position_ids=depths[None], use_cache=False, tree=one)
        positions = np.unique(forest.terms.at[_terms(forest, chunk)]) - chunk.start
        one.hidden = output.last_hidden_state[0, moved(positions, self._device)]

    def _backward(self, forest: Forest, one: _Pass, loss: Loss, found: Tensor) -> None:
        if not one.chunk.kept:
            one.keys, one.values = {}, {}
            self._forward(forest, one)
        assert one.hidden is not None
        back: list[tuple[Tensor, Tensor]] = []  # what this chunk left, and its gradient
        if len(one.hidden):
            hidden, one.hidden = one.hidden, one.hidden.detach().requires_grad_()
            for index, logprobs in self._chosen(forest, one):
                found[index] = logprobs.detach()
                torch.autograd.backward(loss(index, logprobs))
            if one.hidden.grad is not None:
                back.append((hidden, one.hidden.grad))
        back += [(one.keys[layer], grad) for layer, grad in one.key_grads.items()]
        back += [(one.values[layer], grad) for layer, grad in one.value_grads.items()]
        if one.recurrence is not None:
            back += one.recurrence.came_back()
        back = [(tensor, grad.to(tensor.dtype)) for tensor, grad in back if tensor.requires_grad]
        if back:
            torch.autograd.backward([tensor for tensor, _ in back], [grad for _, grad in back])
        one.give_back()
        if one.recurrence is not None:
            one.recurrence.give_back()

    def _chosen(self, forest: Forest, one: _Pass) -> Iterator[tuple[Tensor, Tensor]]:
        """Some terms at a time: their numbers, and their log-probabilities."""
        assert one.hidden is not None
        terms = forest.terms
        here = _terms(forest, one.chunk)
        _, row = np.unique(terms.at[here], return_inverse=True)
        for low in range(0, len(row), LOGITS):
            high = min(low + LOGITS, len(row))
            first, behind = int(row[low]), int(row[high - 1]) + 1
            logits = self._head(one.hidden[first:behind])
            several = behind - first < high - low  # samplings behind the same token
            rows = moved(row[low:high] - first, self._device) if several else None
            some = slice(here.start + low, here.start + high)
            targets = moved(terms.target[some], self._device).long()
            temperature = moved(terms.temperature[some], self._device)
            yield (
                moved(terms.source[some], self._device),
                chosen(logits, targets, temperature, rows=rows, compiled=self._compiled),
            )


def _terms(forest: Forest, chunk: Chunk) -> slice:
    low, high = np.searchsorted(forest.terms.at, [chunk.start, chunk.stop])
    return slice(int(low), int(high))


def _is_done(waiting: list[_Pass], chunk: Chunk) -> bool:
    """The last of them is, if nothing behind this chunk sees it."""
    return bool(waiting) and waiting[-1].chunk.needed <= chunk.stop


# The model


def _parts(model: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return decoder, head
    return decoder, lambda hidden: torch.tanh(head(hidden) / cap) * cap


def _use_tree_attention(model: Any) -> None:
    from transformers import AttentionInterface

    kinds = {*(getattr(model.get_decoder().config, "layer_types", None) or []), "full_attention"}
    if unknown := kinds - {"full_attention", "sliding_attention", "linear_attention"}:
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
    _mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: _Pass | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention."""
    if tree is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand on what its model is called with: it can't run trees."
        )
    if softcap is not None or s_aux is not None:
        raise ConfigError(f"{type(module).__name__} caps its scores, or has sinks: it can't run over trees.")
    if dropout:
        raise ConfigError("The model has dropout in its attention, which makes log-probabilities random: set it to 0.")
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out = tree.attend(module.layer_idx, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None

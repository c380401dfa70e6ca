"""Trees through a model: log-probabilities of what was sampled, and gradients, each token computed once.

    forest -> chunks -> the model's layers, with attention along paths -> logits where something was sampled -> loss

A chunk's keys and values stay until nothing behind it sees them any more. Chunks behind it are given them as if they
were inputs, and what comes back to them as gradients is added up; the chunk's own backward pass begins with that sum,
besides its own loss. This is the chain rule, so the gradient is that of the whole tree at once.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from polar.errors import ConfigError
from polar.records.trajectory import ROOT
from polar.train import flash
from polar.train.attention import AttentionMask
from polar.train.fusion import compiler_settings, fuse_model
from polar.train.logprobs import LOGIT_BATCH_TERMS, compute_chosen_logprobs
from polar.train.memory import choose_grain, plan_memory, release_fragmented_memory, to_device
from polar.train.packing import Chunk, Chunker, Forest, Indices, TokenTree, pack_forest
from polar.train.recurrent import Recurrence, patch_recurrent_layers

_ATTENTION_NAME = "polar_tree"
_TRUNK_TOKENS, _BRANCH_TOKENS = 7, 5  # tokens
_TOLERANCE_BY_DTYPE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 0.1  # of half precision: in the mean, so that a mistake is more than that

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Of some terms (their numbers, as they were given) and their log-probabilities: their part of the loss, a sum."""


class _ChunkPass(Struct):
    """One chunk's way through the layers: what it sees, and what it leaves for those behind it."""

    chunk: Chunk
    mask: AttentionMask
    context: list["_ContextInterval"]
    grain: int  # of flash attention's lengths
    partial_mask: AttentionMask | None = (
        None  # without what all of the chunk sees of its context, where that is not everything
    )
    recurrence: Recurrence | None = None  # where the model has recurrent layers
    hidden: Tensor | None = None  # at the positions that predict something
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of its own tokens
    values: dict[int, Tensor] = field(default_factory=dict)
    context_copies: dict[int, tuple[Tensor, Tensor, list["_ContextInterval"]]] = field(default_factory=dict)
    """By layer, copies of its context's, as inputs, and where they are from."""
    key_grads: dict[int, Tensor] = field(default_factory=dict)  # by layer, what came back to its own
    value_grads: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.keys[layer], self.values[layer] = key, value
        if flash.supports(query) and self.mask.restrict_to_window(window) is None:
            if self.chunk.is_plain:
                pieces = self._context_pieces(layer, self.context)
                compiled = self.mask.compiled
                return flash.attend_with_context(query, key, value, pieces, scale, grain=self.grain, compiled=compiled)
            if self.partial_mask is not None and self.partial_mask.supports_flex_attention(query):
                whole, rest = _split_context(
                    self.context, flash.round_context_length(self.chunk.fully_visible, self.grain)
                )
                own = self.partial_mask.attend_with_lse(query, *self._prepend_context(layer, key, value, rest), scale)
                pieces = self._context_pieces(layer, whole)
                return flash.extend_with_context(query, *own, pieces, scale, grain=self.grain, compiled=True)
        return self.mask.attend(query, *self._prepend_context(layer, key, value, self.context), scale, window)

    def _context_pieces(self, layer: int, context: list["_ContextInterval"]) -> list[flash.KeyValuePiece]:
        """Keys and values where they are."""

        def piece(one: "_ChunkPass", start: int, stop: int) -> flash.KeyValuePiece:
            def give_back(low: int, high: int, key: Tensor, value: Tensor) -> None:
                one.add_gradients(layer, start + low, start + high, key, value)

            key, value = one.keys[layer].detach(), one.values[layer].detach()
            return flash.KeyValuePiece(key[:, :, start:stop], value[:, :, start:stop], give_back)

        return [piece(*where) for where in context]

    def _prepend_context(
        self, layer: int, key: Tensor, value: Tensor, context: list["_ContextInterval"]
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values with the context's in front, as if those were inputs."""
        if not context:
            return key, value
        pieces = self._context_pieces(layer, context)
        keys, values = torch.cat([one.key for one in pieces], 2), torch.cat([one.value for one in pieces], 2)
        if torch.is_grad_enabled():
            # What does not depend on anything that trains needs no gradient here, nor where it is from.
            self.context_copies[layer] = (
                keys.requires_grad_(key.requires_grad),
                values.requires_grad_(value.requires_grad),
                context,
            )
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def propagate_context_gradients(self) -> None:
        """What came back to copies of the context's keys and values goes to the chunks that they are from."""
        for layer, (keys, values, context) in self.context_copies.items():
            at = 0
            for one, start, stop in context:
                here = slice(at, at + stop - start)
                key, value = (None if it.grad is None else it.grad[:, :, here] for it in (keys, values))
                one.add_gradients(layer, start, stop, key, value)
                at += stop - start
        self.context_copies.clear()

    def add_gradients(self, layer: int, start: int, stop: int, key: Tensor | None, value: Tensor | None) -> None:
        """Adds to the gradients of its own keys and values. In fp32: many branches may come back to one trunk."""
        _add_gradient(self.key_grads, layer, self.keys[layer], start, stop, key)
        _add_gradient(self.value_grads, layer, self.values[layer], start, stop, value)


_ContextInterval = tuple[_ChunkPass, int, int]
"""Where some of a context lies: tokens `start` to `stop` of an earlier chunk."""


def _split_context(
    context: list[_ContextInterval], whole: int
) -> tuple[list[_ContextInterval], list[_ContextInterval]]:
    """Its first `whole` tokens, and the rest."""
    first: list[_ContextInterval] = []
    rest: list[_ContextInterval] = []
    for one, start, stop in context:
        edge = start + min(whole, stop - start)
        whole -= edge - start
        if start < edge:
            first.append((one, start, edge))
        if edge < stop:
            rest.append((one, edge, stop))
    return first, rest


def _add_gradient(
    grads: dict[int, Tensor], layer: int, tensor: Tensor, start: int, stop: int, grad: Tensor | None
) -> None:
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
        chunker: Chunker | None = None,
        compiled: bool = True,
    ) -> None:
        """At most `chunk_tokens` go through at once; of at most `kept_tokens` are activations kept for the backward
        pass, while the rest goes through twice. Default: as the machine's memory allows. `cutter` is another model's,
        whose chunks are wanted here. Lengths of attention's calls are multiples of `attention_grain`. Default: as
        flash.py has it for such a model. `compiled` is for CUDA alone: without it small models start sooner, and large
        ones are slow."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._device = next(self._model.parameters()).device
        self._decoder, self._head = _get_decoder_and_head(self._model)
        self._compiled = compiled and self._device.type == "cuda"
        self._recurrent = patch_recurrent_layers(self._decoder)
        self.attention_grain = attention_grain or choose_grain(self._model)
        if chunker is None:
            sizes = plan_memory(
                self._model, chunk_tokens, kept_tokens, grain=self.attention_grain, fused=self._compiled
            )
            chunker = Chunker(*sizes)
        self.chunker = chunker
        own = self._model.config._attn_implementation
        expected = _compute_reference_logprobs(self._model) if own != _ATTENTION_NAME else None
        _use_tree_attention(self._model)
        if expected is not None:
            try:
                _check_tree_logprobs(self._model, self.logprobs(_make_fork(self._model)), expected)
            except BaseException:
                self._model.set_attn_implementation(own)
                raise
        if self._compiled:
            fuse_model(self._model)

    @torch.no_grad()
    def logprobs(self, forest: Forest) -> Tensor:
        """Of each term, in the order in which they were given."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_ChunkPass] = []
        with compiler_settings():
            for chunk in self._plan_chunks(forest, training=False):
                waiting.append(self._start_pass(forest, chunk, waiting))
                self._forward(forest, waiting[-1])
                for index, logprobs in self._compute_term_logprobs(forest, waiting[-1]):
                    found[index] = logprobs
                waiting[-1].hidden = None
                while _is_done(waiting, chunk):
                    waiting.pop()
        return found

    def backward(self, forest: Forest, loss: LossFunction) -> Tensor:
        """Adds the loss's gradient to the parameters'. Returns the log-probabilities, as `logprobs` does.

        Where memory runs out, a part of the gradient has been added: it must be discarded."""
        found = torch.zeros(len(forest.terms), device=self._device)
        waiting: list[_ChunkPass] = []  # the only references: what a pass holds is free when it has ended
        with compiler_settings():
            for chunk in self._plan_chunks(forest, training=True):
                waiting.append(self._start_pass(forest, chunk, waiting))
                with torch.set_grad_enabled(chunk.is_kept):
                    self._forward(forest, waiting[-1])
                while _is_done(waiting, chunk):
                    self._backward(forest, waiting[-1], loss, found)
                    waiting.pop()
        return found

    def keep_less(self, forest: Forest, *, training: bool) -> str | None:
        """For what ran out of memory, and whatever follows it: says what is different now; None if nothing can be."""
        return self.chunker.keep_less(forest, training=training)

    def _plan_chunks(self, forest: Forest, *, training: bool) -> list[Chunk]:
        cut = self.chunker.plan(forest, training=training)
        release_fragmented_memory(self._device, cut.need.bytes)
        return cut.chunks

    # One chunk

    def _start_pass(self, forest: Forest, chunk: Chunk, waiting: list[_ChunkPass]) -> _ChunkPass:
        context = []
        for start, stop in chunk.context:
            for one in waiting:
                low, high = max(start, one.chunk.start), min(stop, one.chunk.stop)
                if low < high:
                    context.append((one, low - one.chunk.start, high - one.chunk.start))
        recurrence = None
        if self._recurrent:
            earlier = (one.recurrence for one in waiting if one.recurrence is not None)
            recurrence = Recurrence.from_chunk(forest, chunk, earlier, self._device)

        def build_mask(skip: int) -> AttentionMask:
            return AttentionMask.from_chunk(forest, chunk, self._device, compiled=self._compiled, skip=skip)

        whole = flash.round_context_length(chunk.fully_visible, self.attention_grain)
        within = build_mask(whole) if whole and self._compiled else None
        return _ChunkPass(chunk, build_mask(0), context, self.attention_grain, within, recurrence)

    def _forward(self, forest: Forest, chunk_pass: _ChunkPass) -> None:
        chunk = chunk_pass.chunk
        ids = to_device(forest.ids[chunk.start : chunk.stop], self._device).long()
        depths = to_device(forest.depths[chunk.start : chunk.stop], self._device).long()
        output = self._decoder(input_ids=ids[None], position_ids=depths[None], use_cache=False, tree=chunk_pass)
        positions = np.unique(forest.terms.positions[_terms_in_chunk(forest, chunk)]) - chunk.start
        chunk_pass.hidden = output.last_hidden_state[0, to_device(positions, self._device)]

    def _backward(self, forest: Forest, chunk_pass: _ChunkPass, loss: LossFunction, logprobs_out: Tensor) -> None:
        if not chunk_pass.chunk.is_kept:
            chunk_pass.keys, chunk_pass.values = {}, {}
            self._forward(forest, chunk_pass)
        assert chunk_pass.hidden is not None
        back: list[tuple[Tensor, Tensor]] = []  # what this chunk left, and its gradient
        if len(chunk_pass.hidden):
            hidden, chunk_pass.hidden = chunk_pass.hidden, chunk_pass.hidden.detach().requires_grad_()
            for index, logprobs in self._compute_term_logprobs(forest, chunk_pass):
                logprobs_out[index] = logprobs.detach()
                torch.autograd.backward(loss(index, logprobs))
            if chunk_pass.hidden.grad is not None:
                back.append((hidden, chunk_pass.hidden.grad))
        back += [(chunk_pass.keys[layer], grad) for layer, grad in chunk_pass.key_grads.items()]
        back += [(chunk_pass.values[layer], grad) for layer, grad in chunk_pass.value_grads.items()]
        if chunk_pass.recurrence is not None:
            back += chunk_pass.recurrence.saved_state_gradients()
        back = [(tensor, grad.to(tensor.dtype)) for tensor, grad in back if tensor.requires_grad]
        if back:
            torch.autograd.backward([tensor for tensor, _ in back], [grad for _, grad in back])
        chunk_pass.propagate_context_gradients()
        if chunk_pass.recurrence is not None:
            chunk_pass.recurrence.propagate_gradients()

    def _compute_term_logprobs(self, forest: Forest, chunk_pass: _ChunkPass) -> Iterator[tuple[Tensor, Tensor]]:
        """Some terms at a time: their numbers, and their log-probabilities."""
        assert chunk_pass.hidden is not None
        terms = forest.terms
        here = _terms_in_chunk(forest, chunk_pass.chunk)
        _, row = np.unique(terms.positions[here], return_inverse=True)
        for low in range(0, len(row), LOGIT_BATCH_TERMS):
            high = min(low + LOGIT_BATCH_TERMS, len(row))
            first, behind = int(row[low]), int(row[high - 1]) + 1
            logits = self._head(chunk_pass.hidden[first:behind])
            several = behind - first < high - low  # samplings behind the same token
            rows = to_device(row[low:high] - first, self._device) if several else None
            some = slice(here.start + low, here.start + high)
            targets = to_device(terms.target[some], self._device).long()
            temperature = to_device(terms.temperature[some], self._device)
            yield (
                to_device(terms.entry_indices[some], self._device),
                compute_chosen_logprobs(logits, targets, temperature, rows=rows, compiled=self._compiled),
            )


def _terms_in_chunk(forest: Forest, chunk: Chunk) -> slice:
    low, high = np.searchsorted(forest.terms.positions, [chunk.start, chunk.stop])
    return slice(int(low), int(high))


def _is_done(waiting: list[_ChunkPass], chunk: Chunk) -> bool:
    """The last of them is, if nothing behind this chunk sees it."""
    return bool(waiting) and waiting[-1].chunk.last_use <= chunk.stop


# The model


def _get_decoder_and_head(model: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
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
    AttentionInterface.register(_ATTENTION_NAME, _tree_attention)
    _separate_config(model)
    model.set_attn_implementation(_ATTENTION_NAME)


def _separate_config(model: Any) -> None:
    """Gives the model a configuration of its own. Models that were made of one configuration share it, and it says
    which attention they have."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)


def _tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: _ChunkPass | None = None,
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


# Whether a model says the same over trees as by itself. Models differ in what they do to scores and logits, and in what
# they hand on to an attention that isn't theirs. So each one is tried on a small fork: two sequences that begin alike.


def _make_fork(model: Any) -> Forest:
    """A trunk with two branches, with a term for each of its tokens but the first."""
    vocabulary = model.get_input_embeddings().num_embeddings
    starts = np.array([0, _TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS, _TRUNK_TOKENS + 2 * _BRANCH_TOKENS], np.int64)
    ids = np.random.default_rng(0).integers(0, vocabulary, starts[-1]).astype(np.int32)
    tokens = np.arange(1, len(ids), dtype=np.int64)
    return pack_forest(
        [TokenTree(ids, starts, np.array([ROOT, 0, 0], np.int32), tokens, np.ones(len(tokens), np.float32))]
    )


@torch.no_grad()
def _compute_reference_logprobs(model: Any) -> Tensor:
    """The log-probabilities of the fork's terms, branch by branch, by the model as it is."""
    packed = _make_fork(model)
    ids = torch.from_numpy(packed.ids).long().to(model.device)
    found = torch.empty(len(ids) - 1)
    for start in (_TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS):
        path = [*range(_TRUNK_TOKENS), *range(start, start + _BRANCH_TOKENS)]
        logprobs = model(input_ids=ids[path][None], use_cache=False).logits[0].float().log_softmax(-1)
        for place in range(1, len(path)):
            found[path[place] - 1] = logprobs[place - 1, ids[path[place]]].cpu()
    return found


def _check_tree_logprobs(model: Any, over_tree: Tensor, reference: Tensor) -> None:
    """Raises ConfigError where they differ."""
    difference = float((over_tree.float().cpu() - reference).abs().mean())
    if not difference <= _TOLERANCE_BY_DTYPE.get(model.dtype, _HALF_PRECISION_TOLERANCE):
        raise ConfigError(
            f"{type(model).__name__} does something to its scores or logits that is not known here: over a tree its "
            f"log-probabilities are off by {difference:.2g}."
        )


# One sequence at a time


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

"""Runs a model over packed trees: log-probabilities of the sampled tokens, and gradients, each token computed once.

    packed trees -> chunks -> the model's layers, with attention along paths -> logits of sampled tokens -> loss

A chunk's keys and values stay until no later chunk attends to them. Later chunks treat them as inputs, and their
gradients are added up; the chunk's own backward pass starts with that sum and its own loss. This is the chain rule, so
the gradient equals that of the whole tree at once.
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
from polar.train import flash_attention
from polar.train.attention import AttentionMask
from polar.train.fusion import fuse_model, use_compiler_settings
from polar.train.logprobs import LOGIT_BATCH_TERMS, compute_chosen_logprobs
from polar.train.memory import choose_length_multiple, plan_memory, release_fragmented_memory, to_device
from polar.train.packing import Chunk, Chunker, Indices, PackedTrees, TokenTree, pack_trees
from polar.train.recurrent import Recurrence, patch_recurrent_layers

_ATTENTION_NAME = "polar_tree"
_TRUNK_TOKENS, _BRANCH_TOKENS = 7, 5  # tokens
_TOLERANCE_BY_DTYPE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 0.1  # mean difference in half precision; a real mistake is larger

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From the indices of some terms and their log-probabilities to their part of the loss, a sum."""


class _ChunkPass(Struct):
    """One chunk's pass through the layers: its context, and its keys and values for later chunks."""

    chunk: Chunk
    mask: AttentionMask
    context: list["_ContextInterval"]
    length_multiple: int  # of flash attention's lengths
    partial_mask: AttentionMask | None = (
        None  # without the part of the context that the whole chunk attends to, if that is not all of it
    )
    recurrence: Recurrence | None = None  # where the model has recurrent layers
    hidden: Tensor | None = None  # at the positions that predict something
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of its own tokens
    values: dict[int, Tensor] = field(default_factory=dict)
    context_copies: dict[int, tuple[Tensor, Tensor, list["_ContextInterval"]]] = field(default_factory=dict)
    """By layer, copies of the context's keys and values, as inputs, and their sources."""
    key_grads: dict[int, Tensor] = field(default_factory=dict)  # by layer, gradients of its own keys
    value_grads: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.keys[layer], self.values[layer] = key, value
        if flash_attention.supports(query) and self.mask.restrict_to_window(window) is None:
            if self.chunk.needs_no_mask:
                pieces = self._get_context_pieces(layer, self.context)
                compiled = self.mask.compiled
                return flash_attention.attend_with_context(
                    query, key, value, pieces, scale, length_multiple=self.length_multiple, compiled=compiled
                )
            if self.partial_mask is not None and self.partial_mask.supports_flex_attention(query):
                shared_context, own_context = _split_context(
                    self.context,
                    flash_attention.round_context_length(self.chunk.fully_visible_tokens, self.length_multiple),
                )
                own_output = self.partial_mask.attend_with_lse(
                    query, *self._prepend_context(layer, key, value, own_context), scale
                )
                pieces = self._get_context_pieces(layer, shared_context)
                return flash_attention.extend_with_context(
                    query, *own_output, pieces, scale, length_multiple=self.length_multiple, compiled=True
                )
        return self.mask.attend(query, *self._prepend_context(layer, key, value, self.context), scale, window)

    def _get_context_pieces(self, layer: int, context: list["_ContextInterval"]) -> list[flash_attention.KeyValuePiece]:
        """Views of the context's keys and values."""

        def make_piece(chunk_pass: "_ChunkPass", start: int, stop: int) -> flash_attention.KeyValuePiece:
            def add_gradients(low: int, high: int, key: Tensor, value: Tensor) -> None:
                chunk_pass.add_gradients(layer, start + low, start + high, key, value)

            key, value = chunk_pass.keys[layer].detach(), chunk_pass.values[layer].detach()
            return flash_attention.KeyValuePiece(key[:, :, start:stop], value[:, :, start:stop], add_gradients)

        return [make_piece(*interval) for interval in context]

    def _prepend_context(
        self, layer: int, key: Tensor, value: Tensor, context: list["_ContextInterval"]
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values with copies of the context's in front, which count as inputs."""
        if not context:
            return key, value
        pieces = self._get_context_pieces(layer, context)
        keys, values = torch.cat([piece.key for piece in pieces], 2), torch.cat([piece.value for piece in pieces], 2)
        if torch.is_grad_enabled():
            # Tensors that depend on no trained parameter need no gradient.
            self.context_copies[layer] = (
                keys.requires_grad_(key.requires_grad),
                values.requires_grad_(value.requires_grad),
                context,
            )
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)

    def propagate_context_gradients(self) -> None:
        """Adds the gradients of the copied keys and values to those of the chunks that they came from."""
        for layer, (keys, values, context) in self.context_copies.items():
            offset = 0
            for source, start, stop in context:
                interval = slice(offset, offset + stop - start)
                key, value = (None if tensor.grad is None else tensor.grad[:, :, interval] for tensor in (keys, values))
                source.add_gradients(layer, start, stop, key, value)
                offset += stop - start
        self.context_copies.clear()

    def add_gradients(self, layer: int, start: int, stop: int, key: Tensor | None, value: Tensor | None) -> None:
        """Adds to the gradients of its own keys and values. In fp32, since many branches may share one trunk."""
        _add_gradient(self.key_grads, layer, self.keys[layer], start, stop, key)
        _add_gradient(self.value_grads, layer, self.values[layer], start, stop, value)


_ContextInterval = tuple[_ChunkPass, int, int]
"""A part of a context: tokens `start` to `stop` of an earlier chunk."""


def _split_context(
    context: list[_ContextInterval], count: int
) -> tuple[list[_ContextInterval], list[_ContextInterval]]:
    """The context's first `count` tokens, and the rest."""
    first: list[_ContextInterval] = []
    rest: list[_ContextInterval] = []
    for chunk_pass, start, stop in context:
        edge = start + min(count, stop - start)
        count -= edge - start
        if start < edge:
            first.append((chunk_pass, start, edge))
        if edge < stop:
            rest.append((chunk_pass, edge, stop))
    return first, rest


def _add_gradient(
    grads: dict[int, Tensor], layer: int, tensor: Tensor, start: int, stop: int, grad: Tensor | None
) -> None:
    if grad is not None:
        if layer not in grads:
            grads[layer] = torch.zeros_like(tensor, dtype=torch.float32)
        grads[layer][:, :, start:stop] += grad


class TreeModel:
    """Runs a Hugging Face causal language model over packed trees, in the model's own type and on its device.

    Raises ConfigError if the model's log-probabilities over a tree differ from those over plain sequences. The model is
    left unchanged in that case."""

    def __init__(
        self,
        model: Any,
        *,
        chunk_tokens: int | None = None,
        kept_tokens: int | None = None,
        attention_length_multiple: int | None = None,
        chunker: Chunker | None = None,
        compiled: bool = True,
    ) -> None:
        """Chunks have at most `chunk_tokens` tokens. Activations of at most `kept_tokens` are kept for the backward
        pass; the others are recomputed. Both default to what fits into memory. `chunker` is another model's, to get the
        same chunks. Lengths of attention's calls are multiples of `attention_length_multiple` (default: see
        flash_attention.py). `compiled` only matters on CUDA: without it small models start sooner, and large ones are
        slow."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._device = next(self._model.parameters()).device
        self._decoder, self._head = _get_decoder_and_head(self._model)
        self._compiled = compiled and self._device.type == "cuda"
        self._recurrent = patch_recurrent_layers(self._decoder)
        self.attention_length_multiple = attention_length_multiple or choose_length_multiple(self._model)
        if chunker is None:
            sizes = plan_memory(
                self._model,
                chunk_tokens,
                kept_tokens,
                length_multiple=self.attention_length_multiple,
                fused=self._compiled,
            )
            chunker = Chunker(*sizes)
        self.chunker = chunker
        own = self._model.config._attn_implementation
        expected = _compute_reference_logprobs(self._model) if own != _ATTENTION_NAME else None
        _use_tree_attention(self._model)
        if expected is not None:
            try:
                _check_tree_logprobs(self._model, self.compute_logprobs(_make_probe_tree(self._model)), expected)
            except BaseException:
                self._model.set_attn_implementation(own)
                raise
        if self._compiled:
            fuse_model(self._model)

    @torch.no_grad()
    def compute_logprobs(self, packed: PackedTrees) -> Tensor:
        """The log-probability of each term, in the order of the trees' entries."""
        term_logprobs = torch.zeros(len(packed.terms), device=self._device)
        waiting: list[_ChunkPass] = []
        with use_compiler_settings():
            for chunk in self._plan_chunks(packed, training=False):
                waiting.append(self._start_pass(packed, chunk, waiting))
                self._forward(packed, waiting[-1])
                for index, logprobs in self._compute_term_logprobs(packed, waiting[-1]):
                    term_logprobs[index] = logprobs
                waiting[-1].hidden = None
                while _is_done(waiting, chunk):
                    waiting.pop()
        return term_logprobs

    def backward(self, packed: PackedTrees, loss: LossFunction) -> Tensor:
        """Adds the gradient of the loss to the parameters' gradients. Returns the log-probabilities of the terms.

        If memory runs out, a part of the gradient has been added already, and the caller must discard it."""
        term_logprobs = torch.zeros(len(packed.terms), device=self._device)
        waiting: list[_ChunkPass] = []  # the only references, so a pass's tensors are freed when it ends
        with use_compiler_settings():
            for chunk in self._plan_chunks(packed, training=True):
                waiting.append(self._start_pass(packed, chunk, waiting))
                with torch.set_grad_enabled(chunk.keeps_activations):
                    self._forward(packed, waiting[-1])
                while _is_done(waiting, chunk):
                    self._backward(packed, waiting[-1], loss, term_logprobs)
                    waiting.pop()
        return term_logprobs

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None:
        """Keeps less in memory from now on. Returns a description of the change, or None if no less is possible."""
        return self.chunker.reduce_memory(packed, training=training)

    def _plan_chunks(self, packed: PackedTrees, *, training: bool) -> list[Chunk]:
        plan = self.chunker.plan(packed, training=training)
        release_fragmented_memory(self._device, plan.need.bytes)
        return plan.chunks

    # One chunk

    def _start_pass(self, packed: PackedTrees, chunk: Chunk, waiting: list[_ChunkPass]) -> _ChunkPass:
        context = []
        for start, stop in chunk.context:
            for earlier_pass in waiting:
                low, high = max(start, earlier_pass.chunk.start), min(stop, earlier_pass.chunk.stop)
                if low < high:
                    context.append((earlier_pass, low - earlier_pass.chunk.start, high - earlier_pass.chunk.start))
        recurrence = None
        if self._recurrent:
            recurrences = (earlier_pass.recurrence for earlier_pass in waiting if earlier_pass.recurrence is not None)
            recurrence = Recurrence.from_chunk(packed, chunk, recurrences, self._device)

        def build_mask(skip: int) -> AttentionMask:
            return AttentionMask.from_chunk(packed, chunk, self._device, compiled=self._compiled, skip=skip)

        shared_context = flash_attention.round_context_length(
            chunk.fully_visible_tokens, self.attention_length_multiple
        )
        partial_mask = build_mask(shared_context) if shared_context and self._compiled else None
        return _ChunkPass(chunk, build_mask(0), context, self.attention_length_multiple, partial_mask, recurrence)

    def _forward(self, packed: PackedTrees, chunk_pass: _ChunkPass) -> None:
        chunk = chunk_pass.chunk
        ids = to_device(packed.ids[chunk.start : chunk.stop], self._device).long()
        depths = to_device(packed.depths[chunk.start : chunk.stop], self._device).long()
        output = self._decoder(input_ids=ids[None], position_ids=depths[None], use_cache=False, tree=chunk_pass)
        positions = np.unique(packed.terms.positions[_select_terms(packed, chunk)]) - chunk.start
        chunk_pass.hidden = output.last_hidden_state[0, to_device(positions, self._device)]

    def _backward(self, packed: PackedTrees, chunk_pass: _ChunkPass, loss: LossFunction, logprobs_out: Tensor) -> None:
        if not chunk_pass.chunk.keeps_activations:
            chunk_pass.keys, chunk_pass.values = {}, {}
            self._forward(packed, chunk_pass)
        assert chunk_pass.hidden is not None
        outputs_and_grads: list[tuple[Tensor, Tensor]] = []  # what this chunk left, and its gradient
        if len(chunk_pass.hidden):
            hidden, chunk_pass.hidden = chunk_pass.hidden, chunk_pass.hidden.detach().requires_grad_()
            for index, logprobs in self._compute_term_logprobs(packed, chunk_pass):
                logprobs_out[index] = logprobs.detach()
                torch.autograd.backward(loss(index, logprobs))
            if chunk_pass.hidden.grad is not None:
                outputs_and_grads.append((hidden, chunk_pass.hidden.grad))
        outputs_and_grads += [(chunk_pass.keys[layer], grad) for layer, grad in chunk_pass.key_grads.items()]
        outputs_and_grads += [(chunk_pass.values[layer], grad) for layer, grad in chunk_pass.value_grads.items()]
        if chunk_pass.recurrence is not None:
            outputs_and_grads += chunk_pass.recurrence.collect_saved_state_gradients()
        outputs_and_grads = [
            (tensor, grad.to(tensor.dtype)) for tensor, grad in outputs_and_grads if tensor.requires_grad
        ]
        if outputs_and_grads:
            torch.autograd.backward(
                [tensor for tensor, _ in outputs_and_grads], [grad for _, grad in outputs_and_grads]
            )
        chunk_pass.propagate_context_gradients()
        if chunk_pass.recurrence is not None:
            chunk_pass.recurrence.propagate_gradients()

    def _compute_term_logprobs(self, packed: PackedTrees, chunk_pass: _ChunkPass) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields some terms at a time: their entry indices and their log-probabilities."""
        assert chunk_pass.hidden is not None
        terms = packed.terms
        term_slice = _select_terms(packed, chunk_pass.chunk)
        _, row = np.unique(terms.positions[term_slice], return_inverse=True)
        for low in range(0, len(row), LOGIT_BATCH_TERMS):
            high = min(low + LOGIT_BATCH_TERMS, len(row))
            first, last = int(row[low]), int(row[high - 1]) + 1
            logits = self._head(chunk_pass.hidden[first:last])
            shares_rows = last - first < high - low  # samplings behind the same token
            rows = to_device(row[low:high] - first, self._device) if shares_rows else None
            batch = slice(term_slice.start + low, term_slice.start + high)
            targets = to_device(terms.target[batch], self._device).long()
            temperature = to_device(terms.temperature[batch], self._device)
            yield (
                to_device(terms.entry_indices[batch], self._device),
                compute_chosen_logprobs(logits, targets, temperature, rows=rows, compiled=self._compiled),
            )


def _select_terms(packed: PackedTrees, chunk: Chunk) -> slice:
    low, high = np.searchsorted(packed.terms.positions, [chunk.start, chunk.stop])
    return slice(int(low), int(high))


def _is_done(waiting: list[_ChunkPass], chunk: Chunk) -> bool:
    """Whether no chunk after this one attends to the last waiting one."""
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
    """Gives the model its own configuration. Models made from one configuration share it, and it selects their
    attention."""
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
    """The attention function that transformers calls."""
    if tree is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass its keyword arguments on to attention: it can't run over trees."
        )
    if softcap is not None or s_aux is not None:
        raise ConfigError(f"{type(module).__name__} caps its scores, or has sinks: it can't run over trees.")
    if dropout:
        raise ConfigError("The model has dropout in its attention, which makes log-probabilities random: set it to 0.")
    scale = module.head_dim**-0.5 if scaling is None else scaling
    out = tree.attend(module.layer_idx, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


# Models differ in what they do to scores and logits, and in what they pass to a custom attention. So each model is
# tried once on a small tree: its log-probabilities must equal those of the plain sequences.


def _make_probe_tree(model: Any) -> PackedTrees:
    """A trunk with two branches, with a term for each token but the first."""
    vocabulary = model.get_input_embeddings().num_embeddings
    starts = np.array([0, _TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS, _TRUNK_TOKENS + 2 * _BRANCH_TOKENS], np.int64)
    ids = np.random.default_rng(0).integers(0, vocabulary, starts[-1]).astype(np.int32)
    tokens = np.arange(1, len(ids), dtype=np.int64)
    return pack_trees(
        [TokenTree(ids, starts, np.array([ROOT, 0, 0], np.int32), tokens, np.ones(len(tokens), np.float32))]
    )


@torch.no_grad()
def _compute_reference_logprobs(model: Any) -> Tensor:
    """The log-probabilities of the probe tree's terms, branch by branch, with the model's own attention."""
    packed = _make_probe_tree(model)
    ids = torch.from_numpy(packed.ids).long().to(model.device)
    reference = torch.empty(len(ids) - 1)
    for start in (_TRUNK_TOKENS, _TRUNK_TOKENS + _BRANCH_TOKENS):
        path = [*range(_TRUNK_TOKENS), *range(start, start + _BRANCH_TOKENS)]
        logprobs = model(input_ids=ids[path][None], use_cache=False).logits[0].float().log_softmax(-1)
        for position in range(1, len(path)):
            reference[path[position] - 1] = logprobs[position - 1, ids[path[position]]].cpu()
    return reference


def _check_tree_logprobs(model: Any, over_tree: Tensor, reference: Tensor) -> None:
    """Raises ConfigError if they differ."""
    difference = float((over_tree.float().cpu() - reference).abs().mean())
    if not difference <= _TOLERANCE_BY_DTYPE.get(model.dtype, _HALF_PRECISION_TOLERANCE):
        raise ConfigError(
            f"{type(model).__name__} can't run over trees: its log-probabilities over a tree differ by "
            f"{difference:.2g} from those over plain sequences."
        )


# One sequence at a time


class SequentialModel:
    """Runs a model over one path at a time, for models that can't run over trees."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def compute_logprobs(self, packed: PackedTrees) -> Tensor:
        term_logprobs = torch.zeros(len(packed.terms), device=self._model.device)
        for path, terms in _iterate_paths(packed):
            term_logprobs[self._get_entry_indices(packed, terms)] = self._score_path(packed, path, terms)
        return term_logprobs

    def backward(self, packed: PackedTrees, loss: LossFunction) -> Tensor:
        term_logprobs = torch.zeros(len(packed.terms), device=self._model.device)
        for path, terms in _iterate_paths(packed):
            index = self._get_entry_indices(packed, terms)
            logprobs = self._score_path(packed, path, terms)
            term_logprobs[index] = logprobs.detach()
            torch.autograd.backward(loss(index, logprobs))
        return term_logprobs

    def reduce_memory(self, packed: PackedTrees, *, training: bool) -> str | None:  # noqa: ARG002
        """Not possible: a sequence is computed as a whole."""
        return None

    def _score_path(self, packed: PackedTrees, path: Indices, terms: Indices) -> Tensor:
        device = self._model.device
        ids = torch.from_numpy(packed.ids[path]).long().to(device)
        positions = torch.from_numpy(packed.depths[packed.terms.positions[terms]]).long().to(device)
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, positions]
        temperature = torch.from_numpy(packed.terms.temperature[terms]).to(device)
        targets = torch.from_numpy(packed.terms.target[terms]).long().to(device)
        return compute_chosen_logprobs(logits, targets, temperature)

    def _get_entry_indices(self, packed: PackedTrees, terms: Indices) -> Tensor:
        return torch.from_numpy(packed.terms.entry_indices[terms]).to(self._model.device)


def _iterate_paths(packed: PackedTrees) -> Iterator[tuple[Indices, Indices]]:
    """Yields paths from a root to a leaf, each with the terms computed on it. Every term occurs once."""
    terms_by_token: dict[int, list[int]] = {}
    for term, position in enumerate(packed.terms.positions):
        terms_by_token.setdefault(int(position), []).append(term)
    leaves = np.setdiff1d(np.arange(len(packed)), packed.before)
    for leaf in leaves:
        path = []
        token = int(leaf)
        while token >= 0:
            path.append(token)
            token = int(packed.before[token])
        terms = [term for token in reversed(path) for term in terms_by_token.pop(token, ())]
        if terms:
            yield np.array(path[::-1], np.int64), np.array(terms, np.int64)

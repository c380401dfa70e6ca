"""Recurrent layers along the paths of a tree: the gated delta nets of Qwen3-Next and Qwen3.5.

Such a layer has a state: the last inputs of a short convolution, and a matrix that each token updates. The state after
a token is all that later tokens know of their path. So a chunk is split into token runs: tokens that follow each other
on a path, up to a branch. A run starts with the state after the token before it. Runs that depend on no other run of
the chunk go through the layer together, then the runs that continue them, and so on.

States pass from chunk to chunk like keys and values: the later chunk treats them as inputs, and their gradients are
added up in the chunk that computed them, whose backward pass starts with the sum.

Everything else in a layer works on single tokens, including a mixture of experts and its router, and needs no change.
Losses over a whole batch, such as load balancing of experts, are not added.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import groupby
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor
from torch.nn import functional

from polar.errors import ConfigError
from polar.records.trajectory import ROOT
from polar.train.memory import to_device
from polar.train.packing import Chunk, Indices, PackedTrees

BLOCK_TOKENS = 64
"""The delta rule processes blocks of this many tokens, so padding a run to a full block costs nothing."""

_DELTA_NET_CLASSES = {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}


class RecurrentState(NamedTuple):
    """A layer's state after a token, or the stacked states after several."""

    conv_window: Tensor  # [convolution kernel size - 1, channels]
    matrix: Tensor  # [heads, key width, value width]


class TokenRunBatch(Struct):
    """Token runs that go through a layer together, padded to one length."""

    lengths: list[int]
    state_indices: list[int]  # the index of each run's initial state; ROOT for an empty one
    token_indices: Tensor  # [runs, longest]: which of the chunk's tokens
    is_token: Tensor  # the same shape: false for padding


class TokenRunPlan(Struct):
    """A chunk's token runs. States are numbered: those of earlier chunks first, then each run's final state, batch by
    batch."""

    received_tokens: list[int]  # packed tokens of earlier chunks that runs continue
    batches: list[TokenRunBatch]
    order: Tensor  # of each token, its row in the concatenated output of the batches
    saved_tokens: dict[int, int]  # packed tokens that later chunks continue, and the index of the state after each

    @classmethod
    def from_chunk(cls, packed: PackedTrees, chunk: Chunk, device: torch.device) -> "TokenRunPlan":
        starts, leaving = _find_runs(packed, chunk)
        stops = np.append(starts[1:], chunk.stop)
        lengths = (stops - starts).tolist()
        before = packed.before[starts].tolist()
        received_tokens = sorted({token for token in before if ROOT != token < chunk.start})

        runs: dict[int, int] = {}  # by their last tokens
        run_keys: list[tuple[int, int]] = []  # of each run: its dependency depth, and its length class
        for run, (token, length) in enumerate(zip(before, lengths, strict=True)):
            run_keys.append(
                (run_keys[runs[token]][0] + 1 if token in runs else 0, ((length - 1) // BLOCK_TOKENS).bit_length())
            )
            runs[int(stops[run]) - 1] = run

        state_indices = {token: number for number, token in enumerate(received_tokens)} | {ROOT: ROOT}
        batches: list[TokenRunBatch] = []
        order = np.empty(len(chunk), np.int64)
        row_count = 0
        for _, run_group in groupby(sorted(range(len(starts)), key=run_keys.__getitem__), run_keys.__getitem__):
            batch_runs = list(run_group)
            longest = max(lengths[run] for run in batch_runs)
            rows = np.minimum(starts[batch_runs, None] + np.arange(longest), stops[batch_runs, None] - 1) - chunk.start
            is_token = np.arange(longest) < (stops - starts)[batch_runs, None]
            order[rows[is_token]] = row_count + np.flatnonzero(is_token)
            row_count += rows.size
            batches.append(
                TokenRunBatch(
                    lengths=[lengths[run] for run in batch_runs],
                    state_indices=[state_indices[before[run]] for run in batch_runs],
                    token_indices=to_device(rows, device),
                    is_token=to_device(is_token, device),
                )
            )
            for run in batch_runs:
                state_indices[int(stops[run]) - 1] = len(state_indices) - 1
        return cls(
            received_tokens, batches, to_device(order, device), {token: state_indices[token] for token in leaving}
        )


def _find_runs(packed: PackedTrees, chunk: Chunk) -> tuple[Indices, list[int]]:
    """Where a chunk's runs begin, and the tokens that later chunks continue."""
    branches = np.flatnonzero(packed.before[1:] != np.arange(len(packed) - 1)) + 1
    branch_points = packed.before[branches]
    is_inside = (branch_points >= chunk.start) & (branch_points < chunk.stop)
    inner_branches = branches[(branches > chunk.start) & (branches < chunk.stop)]
    saved_tokens = set(branch_points[is_inside & (branches >= chunk.stop)].tolist())
    if chunk.stop < len(packed) and packed.before[chunk.stop] == chunk.stop - 1:
        saved_tokens.add(chunk.stop - 1)
    starts = np.unique(np.array([chunk.start, *inner_branches, *(branch_points[is_inside] + 1)], np.int64))
    return starts[starts < chunk.stop], sorted(saved_tokens)


class Recurrence(Struct):
    """One chunk's pass through the recurrent layers: the states it starts from, and those it saves for later chunks."""

    plan: TokenRunPlan
    sources: list[tuple["Recurrence", int]]  # of each received state, its owner, and its position there
    saved_states: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, stacked
    loaded_states: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, received states, as inputs
    grads: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, gradients of the saved states

    @classmethod
    def from_chunk(
        cls, packed: PackedTrees, chunk: Chunk, earlier: Iterable["Recurrence"], device: torch.device
    ) -> "Recurrence":
        plan = TokenRunPlan.from_chunk(packed, chunk, device)
        sources = {
            token: (recurrence, position)
            for recurrence in earlier
            for position, token in enumerate(recurrence.plan.saved_tokens)
        }
        return cls(plan, [sources[token] for token in plan.received_tokens])

    def load_states(self, layer: int, requires_grad: tuple[bool, bool]) -> list[RecurrentState]:
        """The received states, as inputs. `requires_grad` says whether convolution windows and matrices depend on a
        trained parameter; otherwise they need no gradient."""
        if not self.sources:
            return []
        inputs = _stack_states(
            [
                RecurrentState(*(stack[position].detach() for stack in recurrence.saved_states[layer]))
                for recurrence, position in self.sources
            ]
        )
        self.loaded_states[layer] = RecurrentState(
            *(tensor.requires_grad_(needs_grad) for tensor, needs_grad in zip(inputs, requires_grad, strict=True))
        )
        return _unstack_states(inputs)

    def save_states(self, layer: int, states: Sequence[RecurrentState]) -> None:
        if self.plan.saved_tokens:
            self.saved_states[layer] = _stack_states([states[number] for number in self.plan.saved_tokens.values()])

    def collect_saved_state_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The saved states with their gradients."""
        return [
            pair for layer, grads in self.grads.items() for pair in zip(self.saved_states[layer], grads, strict=True)
        ]

    def propagate_gradients(self) -> None:
        """Adds the gradients of the received states to those of their owners. In fp32, since many branches may share
        one trunk."""
        for layer, loaded in self.loaded_states.items():
            for number, (source, position) in enumerate(self.sources):
                if layer not in source.grads:
                    source.grads[layer] = RecurrentState(
                        *(torch.zeros_like(stack).float() for stack in source.saved_states[layer])
                    )
                for grads, loaded_tensor in zip(source.grads[layer], loaded, strict=True):
                    if loaded_tensor.grad is not None:
                        grads[position] += loaded_tensor.grad[number]
        self.loaded_states.clear()


def _stack_states(states: Sequence[RecurrentState]) -> RecurrentState:
    return RecurrentState(*(torch.stack(parts) for parts in zip(*states, strict=True)))


def _unstack_states(stack: RecurrentState) -> list[RecurrentState]:
    return [RecurrentState(*parts) for parts in zip(*stack, strict=True)]


# The model


def patch_recurrent_layers(decoder: Any) -> bool:
    """Patches the model's recurrent layers to follow the tree of a call with `tree=`. Returns whether there are any."""
    nets = [module for module in decoder.modules() if type(module).__name__ in _DELTA_NET_CLASSES]
    kinds = getattr(decoder.config, "layer_types", None) or []
    if len(nets) != kinds.count("linear_attention") or (decoder._is_stateful and not kinds):
        raise ConfigError(
            f"{type(decoder).__name__} has recurrent layers of a kind that can't run over trees: "
            'set [rollout] builder = "prefix_merging".'
        )
    for net in nets:
        net.forward = MethodType(_forward, net)
    return bool(nets)


def _forward(net: Any, hidden_states: Tensor, *args: Any, tree: Any = None, **kwargs: Any) -> Tensor:
    """The forward method that transformers calls on a gated delta net."""
    if tree is None:
        out: Tensor = type(net).forward(net, hidden_states, *args, **kwargs)
        return out
    return _forward_along_tree(net, hidden_states, tree.recurrence)


def _forward_along_tree(net: Any, hidden: Tensor, recurrence: Recurrence) -> Tensor:
    """`hidden` is [1, tokens, width]."""
    mixed, gate, write_rate, decay = _project_inputs(net, hidden)
    empty_state = RecurrentState(
        mixed.new_zeros(net.conv_kernel_size - 1, mixed.shape[-1]),
        decay.new_zeros(net.num_v_heads, net.head_k_dim, net.head_v_dim),
    )
    requires_grad = (
        mixed.requires_grad,
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (mixed, write_rate, decay, net.conv1d.weight)),
    )
    states = recurrence.load_states(net.layer_idx, requires_grad)
    outputs = []
    for batch in recurrence.plan.batches:
        initial = _stack_states(
            [empty_state if state_index == ROOT else states[state_index] for state_index in batch.state_indices]
        )
        out, final = _forward_batch(net, batch, initial, mixed, write_rate, decay)
        outputs.append(out.flatten(0, 1))
        states += final
    recurrence.save_states(net.layer_idx, states)
    ordered = torch.cat(outputs).index_select(0, recurrence.plan.order)
    normed = net.norm(ordered.reshape(-1, net.head_v_dim), gate.reshape(-1, net.head_v_dim))
    result: Tensor = net.out_proj(normed.reshape(*hidden.shape[:2], -1))
    return result


def _project_inputs(net: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: the convolution's inputs, the output gate, the write rate and the decay."""
    if hasattr(net, "in_proj_qkvz"):  # Qwen3-Next's, by heads
        query, key, value, gate, b, a = net.fix_query_key_value_ordering(
            net.in_proj_qkvz(hidden), net.in_proj_ba(hidden)
        )
        mixed = torch.cat([part.flatten(2) for part in (query, key, value)], -1)
    else:
        mixed, gate, b, a = (part(hidden) for part in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a))
    decay = -net.A_log.float().exp() * functional.softplus(a.float() + net.dt_bias)
    return mixed[0], gate, b[0].sigmoid(), decay[0]


def _forward_batch(
    net: Any, batch: TokenRunBatch, initial: RecurrentState, mixed: Tensor, write_rate: Tensor, decay: Tensor
) -> tuple[Tensor, list[RecurrentState]]:
    """The output of a batch of runs, [runs, longest, heads, width], and the final state of each.

    Padding writes nothing and decays nothing, so a shorter run's state stays that of its last token."""
    # transformers' own functions, so that fast kernels are used where it finds them
    functions = import_module(type(net).__module__)
    inputs = torch.cat([initial.conv_window, _select_tokens(mixed, batch)], 1)
    convolved = functions.causal_conv1d_fn(
        inputs.transpose(1, 2), net.conv1d.weight.squeeze(1), net.conv1d.bias, activation=net.activation
    )
    convolved = convolved.transpose(1, 2)[:, net.conv_kernel_size - 1 :]
    query, key, value = convolved.split([net.key_dim, net.key_dim, net.value_dim], -1)
    heads_per_key = net.num_v_heads // net.num_k_heads
    output, states = functions.torch_chunk_gated_delta_rule(
        query.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(heads_per_key, 2),
        key.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(heads_per_key, 2),
        value.unflatten(-1, (-1, net.head_v_dim)),
        g=_select_tokens(decay, batch).masked_fill(~batch.is_token[..., None], 0),
        beta=_select_tokens(write_rate, batch).masked_fill(~batch.is_token[..., None], 0),
        initial_state=initial.matrix,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    final_states = [
        RecurrentState(run[length : length + net.conv_kernel_size - 1], state)
        for run, length, state in zip(inputs, batch.lengths, states, strict=True)
    ]
    return output, final_states


def _select_tokens(tokens: Tensor, batch: TokenRunBatch) -> Tensor:
    return tokens.index_select(0, batch.token_indices.flatten()).reshape(*batch.token_indices.shape, -1)

"""Recurrent layers along the paths of a tree: the gated delta nets of Qwen3-Next and Qwen3.5.

Such a layer has a memory: the last inputs of a short convolution, and a matrix that each token rewrites. The memory
behind a token is all that those after it know of their path. So a chunk is taken apart into runs: tokens that follow
each other on a path, up to where another path goes on as well. A run begins with the memory behind the token before
it. Runs that wait for no other go through the layer together; then those that go on from them, and so forth.

From chunk to chunk memories are handed on as keys and values are: they are inputs there, and what comes back to them
as gradients is added up where they are from, whose backward pass begins with it.

Everything else in a layer looks at one token only, so it needs nothing here: also a mixture of experts, whose router
does. Losses over a whole batch, such as those that balance experts, are not added.
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
"""The rule works on so many tokens at once: filling a run up to as many costs nothing."""

_DELTA_NET_CLASSES = {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}


class RecurrentState(NamedTuple):
    """What a layer knows behind a token, or behind several, stacked."""

    conv_window: Tensor  # [inputs of the convolution but one, channels]
    matrix: Tensor  # [heads, key width, value width]


class TokenRunBatch(Struct):
    """Runs that go through a layer together, the shorter ones filled up."""

    lengths: list[int]
    state_indices: list[int]  # the number of the memory that each begins with; ROOT for none
    token_indices: Tensor  # [runs, longest]: which of the chunk's tokens
    is_token: Tensor  # the same: whether it is there, or fills up


class TokenRunPlan(Struct):
    """A chunk's runs. Memories are numbered: those of earlier chunks, then those behind each run, group by group."""

    received_tokens: list[int]  # the packed tokens of earlier chunks that runs go on from
    batches: list[TokenRunBatch]
    order: Tensor  # of each token, its row among all that the groups put out
    saved_tokens: dict[int, int]  # packed tokens that later chunks go on from, and the memory behind each

    @classmethod
    def from_chunk(cls, packed: PackedTrees, chunk: Chunk, device: torch.device) -> "TokenRunPlan":
        starts, leaving = _find_runs(packed, chunk)
        stops = np.append(starts[1:], chunk.stop)
        lengths = (stops - starts).tolist()
        before = packed.before[starts].tolist()
        received = sorted({token for token in before if ROOT != token < chunk.start})

        runs: dict[int, int] = {}  # by their last tokens
        turns: list[tuple[int, int]] = []  # of each run: after how many others it comes, and how long it is, roughly
        for run, (token, length) in enumerate(zip(before, lengths, strict=True)):
            turns.append(
                (turns[runs[token]][0] + 1 if token in runs else 0, ((length - 1) // BLOCK_TOKENS).bit_length())
            )
            runs[int(stops[run]) - 1] = run

        numbers = {token: number for number, token in enumerate(received)} | {ROOT: ROOT}
        groups: list[TokenRunBatch] = []
        order = np.empty(len(chunk), np.int64)
        done = 0
        for _, members in groupby(sorted(range(len(starts)), key=turns.__getitem__), turns.__getitem__):
            group = list(members)
            longest = max(lengths[run] for run in group)
            rows = np.minimum(starts[group, None] + np.arange(longest), stops[group, None] - 1) - chunk.start
            real = np.arange(longest) < (stops - starts)[group, None]
            order[rows[real]] = done + np.flatnonzero(real)
            done += rows.size
            groups.append(
                TokenRunBatch(
                    lengths=[lengths[run] for run in group],
                    state_indices=[numbers[before[run]] for run in group],
                    token_indices=to_device(rows, device),
                    is_token=to_device(real, device),
                )
            )
            for run in group:
                numbers[int(stops[run]) - 1] = len(numbers) - 1
        return cls(received, groups, to_device(order, device), {token: numbers[token] for token in leaving})


def _find_runs(packed: PackedTrees, chunk: Chunk) -> tuple[Indices, list[int]]:
    """Where a chunk's runs begin, and the tokens that later chunks go on from."""
    branches = np.flatnonzero(packed.before[1:] != np.arange(len(packed) - 1)) + 1
    onto = packed.before[branches]
    within = (onto >= chunk.start) & (onto < chunk.stop)
    inside = branches[(branches > chunk.start) & (branches < chunk.stop)]
    leaving = set(onto[within & (branches >= chunk.stop)].tolist())
    if chunk.stop < len(packed) and packed.before[chunk.stop] == chunk.stop - 1:
        leaving.add(chunk.stop - 1)
    starts = np.unique(np.array([chunk.start, *inside, *(onto[within] + 1)], np.int64))
    return starts[starts < chunk.stop], sorted(leaving)


class Recurrence(Struct):
    """One chunk's way through the recurrent layers: what it goes on from, and what it leaves for those behind it."""

    plan: TokenRunPlan
    sources: list[tuple["Recurrence", int]]  # of each memory received, whose it is, and its place there
    saved_states: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, stacked
    loaded_states: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, those received, as inputs
    grads: dict[int, RecurrentState] = field(default_factory=dict)  # by layer, what came back to those it left

    @classmethod
    def from_chunk(
        cls, packed: PackedTrees, chunk: Chunk, earlier: Iterable["Recurrence"], device: torch.device
    ) -> "Recurrence":
        plan = TokenRunPlan.from_chunk(packed, chunk, device)
        places = {token: (one, place) for one in earlier for place, token in enumerate(one.plan.saved_tokens)}
        return cls(plan, [places[token] for token in plan.received_tokens])

    def load_states(self, layer: int, requires_grad: tuple[bool, bool]) -> list[RecurrentState]:
        """What it goes on from, as if those were inputs. `trained`: whether windows and states depend on anything that
        trains; what does not needs no gradient here, nor where it is from."""
        if not self.sources:
            return []
        inputs = _stack_states(
            [
                RecurrentState(*(stack[place].detach() for stack in one.saved_states[layer]))
                for one, place in self.sources
            ]
        )
        self.loaded_states[layer] = RecurrentState(
            *(tensor.requires_grad_(some) for tensor, some in zip(inputs, requires_grad, strict=True))
        )
        return _unstack_states(inputs)

    def save_states(self, layer: int, states: Sequence[RecurrentState]) -> None:
        if self.plan.saved_tokens:
            self.saved_states[layer] = _stack_states([states[number] for number in self.plan.saved_tokens.values()])

    def collect_saved_state_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """What it left, with the gradients."""
        return [
            both for layer, grads in self.grads.items() for both in zip(self.saved_states[layer], grads, strict=True)
        ]

    def propagate_gradients(self) -> None:
        """What came back to those received goes to the chunks that they are from. It is added up in fp32: many
        branches may come back to one trunk."""
        for layer, seen in self.loaded_states.items():
            for number, (one, place) in enumerate(self.sources):
                if layer not in one.grads:
                    one.grads[layer] = RecurrentState(
                        *(torch.zeros_like(stack).float() for stack in one.saved_states[layer])
                    )
                for mine, theirs in zip(one.grads[layer], seen, strict=True):
                    if theirs.grad is not None:
                        mine[place] += theirs.grad[number]
        self.loaded_states.clear()


def _stack_states(memories: Sequence[RecurrentState]) -> RecurrentState:
    return RecurrentState(*(torch.stack(parts) for parts in zip(*memories, strict=True)))


def _unstack_states(stack: RecurrentState) -> list[RecurrentState]:
    return [RecurrentState(*parts) for parts in zip(*stack, strict=True)]


# The model


def patch_recurrent_layers(decoder: Any) -> bool:
    """Has the recurrent layers of a model follow `tree=` where it is called with one; says whether there are any."""
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
    """As transformers calls a gated delta net."""
    if tree is None:
        out: Tensor = type(net).forward(net, hidden_states, *args, **kwargs)
        return out
    return _forward_along_tree(net, hidden_states, tree.recurrence)


def _forward_along_tree(net: Any, hidden: Tensor, recurrence: Recurrence) -> Tensor:
    """`hidden` is [1, tokens, width]."""
    mixed, gate, rate, decay = _project_inputs(net, hidden)
    none = RecurrentState(
        mixed.new_zeros(net.conv_kernel_size - 1, mixed.shape[-1]),
        decay.new_zeros(net.num_v_heads, net.head_k_dim, net.head_v_dim),
    )
    trained = (
        mixed.requires_grad,
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (mixed, rate, decay, net.conv1d.weight)),
    )
    memories = recurrence.load_states(net.layer_idx, trained)
    outs = []
    for group in recurrence.plan.batches:
        begin = _stack_states([none if origin == ROOT else memories[origin] for origin in group.state_indices])
        out, end = _forward_batch(net, group, begin, mixed, rate, decay)
        outs.append(out.flatten(0, 1))
        memories += end
    recurrence.save_states(net.layer_idx, memories)
    ordered = torch.cat(outs).index_select(0, recurrence.plan.order)
    normed = net.norm(ordered.reshape(-1, net.head_v_dim), gate.reshape(-1, net.head_v_dim))
    result: Tensor = net.out_proj(normed.reshape(*hidden.shape[:2], -1))
    return result


def _project_inputs(net: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: the convolution's inputs, the gate of its output, how much it writes, how much is forgotten."""
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
    net: Any, group: TokenRunBatch, begin: RecurrentState, mixed: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, list[RecurrentState]]:
    """The output of some runs, [runs, longest, heads, width], and the memory behind each.

    What fills up writes nothing and forgets nothing, so a shorter run's state stays as it was behind its last token."""
    # transformers' own functions, so that fast kernels are used where it finds them
    functions = import_module(type(net).__module__)
    inputs = torch.cat([begin.conv_window, _select_tokens(mixed, group)], 1)
    convolved = functions.causal_conv1d_fn(
        inputs.transpose(1, 2), net.conv1d.weight.squeeze(1), net.conv1d.bias, activation=net.activation
    )
    convolved = convolved.transpose(1, 2)[:, net.conv_kernel_size - 1 :]
    query, key, value = convolved.split([net.key_dim, net.key_dim, net.value_dim], -1)
    shared = net.num_v_heads // net.num_k_heads
    out, states = functions.torch_chunk_gated_delta_rule(
        query.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(shared, 2),
        key.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(shared, 2),
        value.unflatten(-1, (-1, net.head_v_dim)),
        g=_select_tokens(decay, group).masked_fill(~group.is_token[..., None], 0),
        beta=_select_tokens(rate, group).masked_fill(~group.is_token[..., None], 0),
        initial_state=begin.matrix,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ends = [
        RecurrentState(run[length : length + net.conv_kernel_size - 1], state)
        for run, length, state in zip(inputs, group.lengths, states, strict=True)
    ]
    return out, ends


def _select_tokens(tokens: Tensor, group: TokenRunBatch) -> Tensor:
    return tokens.index_select(0, group.token_indices.flatten()).reshape(*group.token_indices.shape, -1)

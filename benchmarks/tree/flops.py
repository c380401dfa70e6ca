"""What a training step has to compute, counted exactly.

    matrices    2 FLOPs forward for each weight of a matrix and each token; the output's (`lm_head`) only where a
                log-probability is asked for
    attention   4 * heads * head_dim FLOPs forward in each layer for each pair of a token and one that it sees, itself
                included
    backward    twice as many as forward, for both

What is computed a second time in the backward pass (checkpoints, and the scores that flash attention doesn't keep) is
not counted, nor are norms, rotations and the optimizer: so a step's rate is that of what had to be done.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from polar.train.packing import PackedTrees


class ModelSizes(Struct, frozen=True):
    """Of a dense decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def from_config(cls, config: Any) -> "ModelSizes":
        """A Hugging Face config of a dense decoder, as Llama's and Qwen3's."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
        )

    @property
    def matrices(self) -> int:
        """Weights in all layers' matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


class Flops(Struct, frozen=True):
    """Forward and backward."""

    matrices: float
    output: float
    attention: float

    @property
    def total(self) -> float:
        return self.matrices + self.output + self.attention


def count_flops(sizes: ModelSizes, packed: PackedTrees) -> Flops:
    pairs = int(packed.depths.sum(dtype=np.int64)) + len(packed)
    return compute_flops(sizes, len(packed), len(np.unique(packed.terms.positions)), pairs)


def compute_flops(sizes: ModelSizes, tokens: int, asked: int, pairs: int) -> Flops:
    """Of so many tokens, positions where something is asked for, and pairs of a token and one that it sees."""
    return Flops(
        matrices=3 * 2.0 * sizes.matrices * tokens,
        output=3 * 2.0 * sizes.hidden * sizes.vocabulary * asked,
        attention=3 * 4.0 * sizes.layers * sizes.heads * sizes.head_dim * pairs,
    )


def add_flops(parts: Sequence[Flops]) -> Flops:
    return Flops(*(sum(getattr(part, name) for part in parts) for name in Flops.__struct_fields__))

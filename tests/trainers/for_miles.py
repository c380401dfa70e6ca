"""To be imported before Miles, which is installed apart from the others: it brings SGLang's and Megatron's sources with
it, under their own names, and others look for those."""

import sys
from pathlib import Path
from typing import Any

import absent
import torch

absent.packages("megatron", "sglang", "sglang_router", "miles.backends.sglang_utils.sglang_engine")
sys.path.append(str(Path(sys.prefix).parent / "apart"))

import megatron.core.fusions.fused_cross_entropy as fused  # noqa: E402


def cross_entropy(logits: Any, targets: Any, _: Any) -> Any:
    """Megatron's, of one rank."""
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


fused.fused_vocab_parallel_cross_entropy = cross_entropy
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]

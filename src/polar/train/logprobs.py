"""Log-probabilities of chosen tokens, from logits.

A vocabulary is wide, and so are its logits: step by step, as autograd has it, a dozen kernels read and write all of
them in fp32. Here one goes forward and one back (compiled, on a GPU), and nothing is kept but what the model said.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polar.train import fusion

LOGIT_BATCH_TERMS = 1024
"""Terms whose logits exist at the same time: a vocabulary is wide."""


def compute_chosen_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, rows: Tensor | None = None, compiled: bool = False
) -> Tensor:
    """Of [rows, vocabulary] logits, divided by each target's temperature: those of `targets`, in fp32. A target has a
    row of its own, in their order, or the one that `rows` says."""
    if rows is not None:
        logits = logits.float()[rows]  # what goes back to a row is added up in fp32
    apply: Any = _ChosenLogprobs.apply
    result: Tensor = apply(logits, targets, temperature, compiled)
    return result


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, compiled: bool) -> Tensor:
        chosen, lse = _compile_if_enabled(_forward, compiled)(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, temperature, lse)
        ctx.compiled = compiled
        result: Tensor = chosen
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _compile_if_enabled(_backward, ctx.compiled)(*ctx.saved_tensors, grad), None, None, None


def _forward(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature[:, None]
    lse = scaled.logsumexp(1)
    return scaled.gather(1, targets[:, None])[:, 0] - lse, lse


def _backward(logits: Tensor, targets: Tensor, temperature: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    shares = torch.exp(logits.float() / temperature[:, None] - lse[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((hit.float() - shares) * (grad / temperature)[:, None]).to(logits.dtype)


def _compile_if_enabled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return fusion.compile_dynamic(function) if compiled else function

"""Log-probabilities of chosen tokens, and what goes back to the logits."""

import pytest
import torch
from torch import Tensor

from polar.train.logprobs import compute_chosen_logprobs

ROWS, VOCABULARY = 7, 300


def _plain(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    scaled = logits.double() / temperature[:, None].double()
    return scaled.log_softmax(1).gather(1, targets[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_is_the_logarithm_of_a_softmax(kind: torch.dtype, close: float, compiled: bool) -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(ROWS, VOCABULARY)).to(kind).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,))
    targets[0] = logits[0].argmin()  # it hardly ever is: all of the gradient
    temperature = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7, 1.0, 5.0])
    grad = torch.randn(ROWS)
    expected = _plain(logits, targets, temperature)
    (right,) = torch.autograd.grad(expected, logits, grad.double())
    found = compute_chosen_logprobs(logits, targets, temperature, compiled=compiled)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-5)
    (mine,) = torch.autograd.grad(found, logits, grad)
    assert mine.dtype == kind
    assert float((mine.double() - right.double()).norm() / right.double().norm()) < close


def test_what_goes_back_to_a_row_of_several_targets_is_added_up_in_full_precision() -> None:
    """Each sampling of a token behind a prompt that all sessions share is one of its row's."""
    torch.manual_seed(0)
    count = 256
    logits = torch.randn(1, VOCABULARY).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (count,))
    rows = torch.zeros(count, dtype=torch.int64)
    compute_chosen_logprobs(logits, targets, torch.ones(count), rows=rows).sum().backward()
    assert logits.grad is not None
    right = torch.nn.functional.one_hot(targets, VOCABULARY).sum(0) - count * logits.detach().double().softmax(1)[0]
    assert float((logits.grad[0].double() - right).norm() / right.norm()) < 5e-3


def test_nothing_is_kept_of_a_wide_vocabulary_but_the_logits() -> None:
    logits = torch.randn(ROWS, VOCABULARY, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_chosen_logprobs(logits, torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS))
    wide = [tensor for tensor in kept if tensor.numel() >= VOCABULARY]
    assert [tensor.data_ptr() for tensor in wide] == [logits.data_ptr()]

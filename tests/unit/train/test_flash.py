"""The joining of attention's parts, with the kernels' place taken by plain arithmetic: those need a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polar.train import flash

HEADS, SHARED, WIDTH = 4, 2, 8


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query @ key.repeat_interleave(HEADS // SHARED, 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    return scores


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    scores = _scores(query, key, causal, scale)
    normaliser = scores.logsumexp(-1, keepdim=True)
    return (scores - normaliser).exp() @ value.repeat_interleave(HEADS // SHARED, 1), normaliser, None


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor, _: Any, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What flash attention's backward kernels do with the output and the normaliser that they are given."""
    weights = (_scores(query, key, causal, scale) - normaliser).exp()
    values = value.repeat_interleave(HEADS // SHARED, 1)
    inner = weights * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    dq = inner @ key.repeat_interleave(HEADS // SHARED, 1) * scale
    dk, dv = inner.transpose(-1, -2) @ query * scale, weights.transpose(-1, -2) @ grad

    def shared(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (SHARED, -1)).sum(2)

    return dq, shared(dk), shared(dv)


@pytest.mark.parametrize("lengths", [[], [16], [5], [7, 40, 3]])
@pytest.mark.parametrize("count", [24, 8, 13])
def test_the_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, lengths: list[int], count: int) -> None:
    for name, value in {"QUERIES": 8, "KEYS": 16, "_forward": _forward, "_backward": _backward}.items():
        monkeypatch.setattr(flash, name, value)
    torch.manual_seed(len(lengths) + count)

    def some(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, WIDTH, dtype=torch.float64, requires_grad=True)

    query, key, value = some(HEADS, count), some(SHARED, count), some(SHARED, count)
    theirs = [(some(SHARED, length), some(SHARED, length)) for length in lengths]
    back = [(torch.zeros_like(one), torch.zeros_like(other)) for one, other in theirs]

    def piece(number: int) -> flash.Piece:
        def give_back(start: int, stop: int, key: Tensor, value: Tensor) -> None:
            back[number][0][:, :, start:stop] += key
            back[number][1][:, :, start:stop] += value

        return flash.Piece(theirs[number][0].detach(), theirs[number][1].detach(), give_back)

    out = flash.joined_attention(query, key, value, [piece(number) for number in range(len(lengths))], 0.3)
    grad = torch.randn_like(out)
    out.backward(grad)
    found = [query.grad, key.grad, value.grad, *(tensor for pair in back for tensor in pair)]

    inputs = [query, key, value, *(tensor for pair in theirs for tensor in pair)]
    keys = torch.cat([*(one for one, _ in theirs), key], 2).repeat_interleave(HEADS // SHARED, 1)
    values = torch.cat([*(other for _, other in theirs), value], 2).repeat_interleave(HEADS // SHARED, 1)
    seen = torch.ones(count, count + sum(lengths)).tril(sum(lengths)) == 1
    expected = (query @ keys.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1) @ values
    assert torch.allclose(out.float(), expected.float(), atol=1e-6)  # joined in fp32
    for mine, right in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert mine is not None
        assert torch.allclose(mine, right, atol=1e-5)


@pytest.mark.parametrize("lengths", [[16], [5], [7, 40, 3]])
@pytest.mark.parametrize("count", [24, 8, 13])
def test_somebody_elses_attention_is_a_part_like_others(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], count: int
) -> None:
    """Of queries that do not all see the same of each other: here, every other one is hidden."""
    for name, value in {"QUERIES": 8, "KEYS": 16, "_forward": _forward, "_backward": _backward}.items():
        monkeypatch.setattr(flash, name, value)
    torch.manual_seed(len(lengths) + count)

    def some(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, WIDTH, dtype=torch.float64, requires_grad=True)

    query, key, value = some(HEADS, count), some(SHARED, count), some(SHARED, count)
    theirs = [(some(SHARED, length), some(SHARED, length)) for length in lengths]
    back = [(torch.zeros_like(one), torch.zeros_like(other)) for one, other in theirs]

    def piece(number: int) -> flash.Piece:
        def give_back(start: int, stop: int, key: Tensor, value: Tensor) -> None:
            back[number][0][:, :, start:stop] += key
            back[number][1][:, :, start:stop] += value

        return flash.Piece(theirs[number][0].detach(), theirs[number][1].detach(), give_back)

    places = torch.arange(count)
    seen = (places[:, None] >= places) & ((places % 2 == 0) | (places[:, None] == places))
    scores = _scores(query, key, False, 0.3).masked_fill(~seen, -torch.inf)
    own = scores.softmax(-1) @ value.repeat_interleave(HEADS // SHARED, 1)
    pieces = [piece(number) for number in range(len(lengths))]
    out = flash.extended_attention(query, own, scores.logsumexp(-1), pieces, 0.3)
    grad = torch.randn_like(out)
    out.backward(grad)
    found = [query.grad, key.grad, value.grad, *(tensor for pair in back for tensor in pair)]

    inputs = [query, key, value, *(tensor for pair in theirs for tensor in pair)]
    keys = torch.cat([*(one for one, _ in theirs), key], 2).repeat_interleave(HEADS // SHARED, 1)
    values = torch.cat([*(other for _, other in theirs), value], 2).repeat_interleave(HEADS // SHARED, 1)
    everything = torch.cat([torch.ones(count, sum(lengths)) == 1, seen], 1)
    expected = (query @ keys.transpose(-1, -2) * 0.3).masked_fill(~everything, -torch.inf).softmax(-1) @ values
    assert torch.allclose(out.float(), expected.float(), atol=1e-6)
    for mine, right in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert mine is not None
        assert torch.allclose(mine, right, atol=1e-5)

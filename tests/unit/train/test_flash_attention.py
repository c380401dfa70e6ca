"""The joining of attention's parts, with the kernels' place taken by plain arithmetic: those need a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from polar.train import flash_attention

HEADS, SHARED, WIDTH = 4, 2, 8
KERNELS = flash_attention._forward, flash_attention._backward


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query @ key.repeat_interleave(HEADS // SHARED, 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    return scores


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    scores = _scores(query, key, causal, scale)
    normaliser = scores.logsumexp(-1, keepdim=True)
    out = (scores - normaliser).exp() @ value.repeat_interleave(HEADS // SHARED, 1)
    state = query.shape, key.shape, causal  # the backward pass of the same call is given it
    return torch.empty_like(query).copy_(out), normaliser, state  # it lies as the queries do


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normaliser: Tensor, state: Any,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What flash attention's backward kernels do with the output and the normaliser that they are given."""
    assert state == (query.shape, key.shape, causal)
    assert grad.stride() == out.stride()  # else PyTorch would copy it
    assert normaliser.is_contiguous()  # the kernels want that
    weights = (_scores(query, key, causal, scale) - normaliser).exp()
    values = value.repeat_interleave(HEADS // SHARED, 1)
    inner = weights * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    dq = inner @ key.repeat_interleave(HEADS // SHARED, 1) * scale
    dk, dv = inner.transpose(-1, -2) @ query * scale, weights.transpose(-1, -2) @ grad

    def shared(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (SHARED, -1)).sum(2)

    return dq, shared(dk), shared(dv)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of the kernels that go forward: which of them were causal."""
    told: list[bool] = []

    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
        assert query.shape[2] == key.shape[2] or not causal
        told.append(causal)
        return _forward(query, key, value, causal, scale)

    for name, value in {"_MIN_CONTEXT_TOKENS": 16, "_forward": forward, "_backward": _backward}.items():
        monkeypatch.setattr(flash_attention, name, value)
    return told


@pytest.fixture(params=[1, 8])
def length_multiple(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the lengths that kernels are given are multiples of."""
    given: int = request.param
    forward = flash_attention._forward

    def checked(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
        assert not query.shape[2] % given
        assert not key.shape[2] % given
        return forward(query, key, value, causal, scale)

    monkeypatch.setattr(flash_attention, "_forward", checked)
    return given


class Given:
    """Queries with keys and values of their own, behind pieces of such lengths."""

    def __init__(self, lengths: list[int], count: int) -> None:
        torch.manual_seed(len(lengths) + count)
        self.count, self.before = count, sum(lengths)
        self.query, self.key, self.value = _some(HEADS, count), _some(SHARED, count), _some(SHARED, count)
        self.theirs = [(_some(SHARED, length), _some(SHARED, length)) for length in lengths]
        self.back = [(torch.zeros_like(one), torch.zeros_like(other)) for one, other in self.theirs]

    @property
    def pieces(self) -> list[flash_attention.KeyValuePiece]:
        return [self._piece(number) for number in range(len(self.theirs))]

    def _piece(self, number: int) -> flash_attention.KeyValuePiece:
        def give_back(start: int, stop: int, key: Tensor, value: Tensor) -> None:
            self.back[number][0][:, :, start:stop] += key
            self.back[number][1][:, :, start:stop] += value

        return flash_attention.KeyValuePiece(
            self.theirs[number][0].detach(), self.theirs[number][1].detach(), give_back
        )

    def check(self, out: Tensor, seen: Tensor) -> None:
        """All of the pieces are seen, and of the queries' own keys those that `seen` says: so are gradients."""
        assert out.transpose(1, 2).is_contiguous()
        grad = torch.randn_like(out)
        out.backward(grad)
        found = [self.query.grad, self.key.grad, self.value.grad, *(tensor for pair in self.back for tensor in pair)]
        inputs = [self.query, self.key, self.value, *(tensor for pair in self.theirs for tensor in pair)]
        keys = torch.cat([*(one for one, _ in self.theirs), self.key], 2).repeat_interleave(HEADS // SHARED, 1)
        values = torch.cat([*(other for _, other in self.theirs), self.value], 2).repeat_interleave(HEADS // SHARED, 1)
        everything = torch.cat([torch.ones(self.count, self.before) == 1, seen], 1)
        scores = (self.query @ keys.transpose(-1, -2) * 0.3).masked_fill(~everything, -torch.inf)
        expected = scores.softmax(-1) @ values
        assert torch.allclose(out.float(), expected.float(), atol=1e-6)  # joined in fp32
        for mine, right in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
            assert mine is not None
            assert torch.allclose(mine, right, atol=1e-5)


def _some(heads: int, tokens: int) -> Tensor:
    """As projections leave it: by tokens."""
    made = torch.randn(1, tokens, heads, WIDTH, dtype=torch.float64)
    return made.transpose(1, 2).requires_grad_()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> bool:
    given: bool = request.param
    return given


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.parametrize("lengths", [[], [16], [5], [2, 1, 3], [7, 40, 3], [300, 7]])
@pytest.mark.parametrize("count", [24, 8, 13])
def test_the_parts_are_the_whole(lengths: list[int], count: int, length_multiple: int, compiled: bool) -> None:
    given = Given(lengths, count)
    out = flash_attention.attend_with_context(
        given.query, given.key, given.value, given.pieces, 0.3, length_multiple=length_multiple, compiled=compiled
    )
    given.check(out, torch.ones(count, count).tril() == 1)


@pytest.mark.parametrize(
    ("lengths", "causal"),
    [([], [True]), ([2, 1, 3], [True]), ([15], [True]), ([16], [True, False]), ([9, 30], [True, False])],
)
def test_a_short_context_needs_no_call_of_its_own(
    calls: list[bool], lengths: list[int], causal: list[bool], length_multiple: int
) -> None:
    given = Given(lengths, 24)
    flash_attention.attend_with_context(
        given.query, given.key, given.value, given.pieces, 0.3, length_multiple=length_multiple
    )
    assert calls == causal


@pytest.mark.parametrize(("before", "causal"), [(20, [True]), (21, [True, False])])
def test_nor_does_one_that_is_short_beside_the_queries(calls: list[bool], before: int, causal: list[bool]) -> None:
    given = Given([before], 80)
    flash_attention.attend_with_context(given.query, given.key, given.value, given.pieces, 0.3, length_multiple=1)
    assert calls == causal


@pytest.mark.parametrize("before", [16, 300])
def test_gradients_that_lie_otherwise_are_laid_out(before: int) -> None:
    """The kernels' places are taken by what asserts it."""
    one, other = Given([before], 13), Given([before], 13)
    grads = []
    for given, grad in ((one, torch.ones(1, HEADS, 13, WIDTH)), (other, torch.ones(()).expand(1, HEADS, 13, WIDTH))):
        out = flash_attention.attend_with_context(
            given.query, given.key, given.value, given.pieces, 0.3, length_multiple=1
        )
        out.backward(grad.double())
        grads.append(given.query.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_few_queries_have_few_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a context goes with as many of those."""
    paths: list[int] = []

    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
        if causal:
            paths.append(query.shape[2])
        return _forward(query, key, value, causal, scale)

    monkeypatch.setattr(flash_attention, "_forward", forward)
    for count in (1, 8, 40, 64):
        given = Given([1023], count)  # 63 would be left of it
        flash_attention.attend_with_context(given.query, given.key, given.value, given.pieces, 0.3, length_multiple=1)
    assert paths == [1, 8 + 1, 40 + 7, 64 + 15]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.slow
def test_few_variants_are_compiled_for_parts_of_all_kinds() -> None:
    """One where nothing is left of a context, one where something is: PyTorch tells parts from the first token on from
    others."""
    torch._dynamo.reset()
    earlier = counters["stats"]["unique_graphs"]
    for before in range(30, 60):
        for count in (9, 13, 17, 24):
            given = Given([before], count)
            flash_attention.attend_with_context(
                given.query, given.key, given.value, given.pieces, 0.3, length_multiple=8, compiled=True
            )
    assert counters["stats"]["unique_graphs"] - earlier == 2


def test_contexts_of_many_lengths_have_calls_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of lengths costs a plan that is kept for good."""
    asked: set[tuple[int, int]] = set()

    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
        if not causal:
            asked.add((query.shape[2], key.shape[2]))
            assert query.shape[2] == 256  # nobody else asks of so much
        return _forward(query, key, value, causal, scale)

    monkeypatch.setattr(flash_attention, "_forward", forward)
    for before in range(256, 512, 3):
        given = Given([before], 253)
        flash_attention.attend_with_context(given.query, given.key, given.value, given.pieces, 0.3, length_multiple=8)
    assert asked == {(256, length) for length in range(256, 512, 32)}


def test_plans_do_not_tell_apart_what_a_tensor_is_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks for a plan by the strides of queries, keys and values, the batch's among them."""
    told: list[tuple[int, ...]] = []

    def kernel(*given: Any, **_: Any) -> tuple[Tensor, ...]:
        told.extend(tensor.stride() for tensor in given[:4] if tensor is not None and tensor.dim() == 4)
        return given[0], given[0], *(torch.zeros(()),) * 7

    def back(grad: Tensor, *given: Any, **_: Any) -> tuple[Tensor, ...]:
        told.extend(tensor.stride() for tensor in given[:3])
        return given[:3]

    operators = {
        "_scaled_dot_product_cudnn_attention": kernel,
        "_scaled_dot_product_cudnn_attention_backward": back,
    }
    monkeypatch.setattr(flash_attention, "_aten", SimpleNamespace(**operators))
    forward, backward = KERNELS
    for length in (8, 9, 50):
        part = _some(HEADS, length)[:, :, 1:8].detach()
        out, normaliser, state = forward(part, part, part, False, 0.3)
        assert torch.equal(out, part)
        backward(part, part, part, part, out, normaliser, state, False, 0.3)
    assert set(told) == {_some(HEADS, 7).stride()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # it looks there
@pytest.mark.parametrize("lengths", [[16], [5, 11], [7, 40, 1]])
@pytest.mark.parametrize("count", [24, 8, 13])
def test_somebody_elses_attention_is_a_part_like_others(
    lengths: list[int], count: int, length_multiple: int, compiled: bool
) -> None:
    """Of queries that do not all see the same of each other: here, every other one is hidden."""
    given = Given(lengths, count)
    places = torch.arange(count)
    seen = (places[:, None] >= places) & ((places % 2 == 0) | (places[:, None] == places))
    scores = _scores(given.query, given.key, False, 0.3).masked_fill(~seen, -torch.inf)
    own = (scores.softmax(-1) @ given.value.repeat_interleave(HEADS // SHARED, 1)).transpose(1, 2).contiguous()
    out = flash_attention.extend_with_context(
        given.query,
        own.transpose(1, 2),
        scores.logsumexp(-1),
        given.pieces,
        0.3,
        length_multiple=length_multiple,
        compiled=compiled,
    )
    given.check(out, seen)


def test_gradients_are_laid_out_as_the_output_is() -> None:
    """Kernels take them as they lie. By tokens, as projections want it, nothing is copied."""
    out = torch.zeros(1, 5, HEADS, WIDTH).transpose(1, 2)
    grad = torch.randn(1, 5, HEADS, WIDTH).transpose(1, 2)
    assert flash_attention._match_layout(grad, out) is grad
    for other in (grad.contiguous(), torch.ones(()).expand_as(out)):
        laid = flash_attention._match_layout(other, out)
        assert laid.stride() == out.stride()
        assert torch.equal(laid, other)

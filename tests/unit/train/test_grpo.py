"""Advantages and losses, against what is true of them whatever the numbers are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar.train import grpo

numbers = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))
groups = st.lists(st.tuples(numbers, st.lists(numbers, min_size=1, max_size=4)), min_size=2, max_size=6)
plain = st.lists(numbers, min_size=2, max_size=8)


def of(rewards: list[float], **options: object) -> np.ndarray:
    """Without rewards of turns: one advantage a session."""
    found = grpo.compute_advantages(rewards, [[0.0]] * len(rewards), **options)  # type: ignore[arg-type]
    return np.array([row[0] for row in found])


def test_by_hand() -> None:
    assert of([1, 0, 0, 1], scale=False).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert of([1, 0, 0, 1]).tolist() == [1, -1, -1, 1]
    assert of([3, 0, 0], baseline="leave_one_out", scale=False).tolist() == pytest.approx([3, -1.5, -1.5])


@given(plain)
def test_they_are_zero_together_and_keep_the_order(rewards: list[float]) -> None:
    for scale in (True, False):
        found = of(rewards, scale=scale)
        assert abs(found.sum()) < 1e-6
        assert (np.argsort(found, kind="stable") == np.argsort(rewards, kind="stable")).all()


@given(plain, numbers, st.floats(0.1, 10))
def test_scaled_ones_do_not_depend_on_the_unit(rewards: list[float], shift: float, factor: float) -> None:
    moved = [factor * reward + shift for reward in rewards]
    np.testing.assert_allclose(of(moved), of(rewards), atol=1e-4)


@given(plain)
def test_leave_one_out_compares_with_the_others(rewards: list[float]) -> None:
    found = of(rewards, baseline="leave_one_out", scale=False)
    for place, reward in enumerate(rewards):
        others = [*rewards[:place], *rewards[place + 1 :]]
        assert found[place] == pytest.approx(reward - np.mean(others), abs=1e-6)


@given(st.floats(-5, 5), st.integers(2, 9))
def test_equal_rewards_have_no_signal(reward: float, sessions: int) -> None:
    assert not of([reward] * sessions).any()


@given(groups)
def test_a_turn_is_given_what_came_after_it(group: list[tuple[float, list[float]]]) -> None:
    """Against the definition: the session's reward and its turns' from there on, less the group's mean of that."""
    rewards, turns = [one for one, _ in group], [list(some) for _, some in group]
    found = grpo.compute_advantages(rewards, turns, scale=False)
    for place, row in enumerate(found):
        for turn, advantage in enumerate(row):
            returns = [reward + sum(some[turn:]) for reward, some in zip(rewards, turns, strict=True)]
            assert advantage == pytest.approx(returns[place] - np.mean(returns), abs=1e-6)


def test_a_turn_has_no_part_in_what_was_earned_before_it() -> None:
    first, second = grpo.compute_advantages([0, 0], [[5, 1], [0, 1]], scale=False)
    assert (first.tolist(), second.tolist()) == ([2.5, 0], [-2.5, 0])


@given(st.floats(-3, 0), st.floats(-3, 0), st.floats(1, 4))
def test_importance_is_bounded_above_alone(old: float, behaviour: float, cap: float) -> None:
    found = float(grpo.compute_importance_weights(torch.tensor(old), torch.tensor(behaviour), cap))
    assert found == pytest.approx(min(cap, np.exp(old - behaviour)), rel=1e-5)


def loss(logprob: float, old: float, coefficient: float) -> tuple[float, float]:
    """The loss of one token, and its gradient."""
    tensor = torch.tensor([logprob], requires_grad=True)
    found = grpo.compute_policy_loss(
        tensor, torch.tensor([old]), torch.tensor([1.0]), torch.tensor([coefficient]), clip_low=0.2, clip_high=0.28
    )
    (grad,) = torch.autograd.grad(found, tensor)
    return float(found.detach()), float(grad)


def test_clipping_is_higher_than_low() -> None:
    up, down = float(np.log(1.27)), float(np.log(0.81))
    assert loss(up, 0.0, 1.0)[1] == pytest.approx(-1.27, rel=1e-5)  # between 1.2 and 1.28: still learned from
    assert loss(float(np.log(1.29)), 0.0, 1.0)[1] == 0
    assert loss(down, 0.0, -1.0)[1] == pytest.approx(0.81, rel=1e-5)
    assert loss(float(np.log(0.79)), 0.0, -1.0)[1] == 0
    assert loss(float(np.log(2.0)), 0.0, -1.0)[1] == pytest.approx(2.0, rel=1e-5)  # what is bad gets no excuse


@given(st.floats(-5, 0), st.floats(-2, 2))
def test_on_policy_the_gradient_is_that_of_plain_policy_gradient(logprob: float, coefficient: float) -> None:
    assert loss(logprob, logprob, coefficient)[1] == pytest.approx(-coefficient, abs=1e-6)


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_divergence_is_never_negative_and_zero_where_they_agree(logprob: float, reference: float) -> None:
    found = float(grpo.estimate_kl(torch.tensor(logprob), torch.tensor(reference)))
    assert found >= -1e-6
    assert float(grpo.estimate_kl(torch.tensor(logprob), torch.tensor(logprob))) == 0

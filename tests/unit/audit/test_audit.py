"""Each way to spoil rollouts is found, named and located; what is in order is left in peace."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.audit.audit import AuditReport, audit
from polar.audit.rows import RawRow
from polar.errors import ConfigError
from polar.trajectory.teacher import Teacher
from tests.unit.audit.rollouts import VOCABULARY, Policy, fields, rows, small, teacher

EXACT = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return small()


@pytest.fixture(scope="module")
def judge(model: Any) -> Teacher:
    return teacher(model)


@pytest.fixture(scope="module")
def made(model: Any) -> list[RawRow]:
    policy = Policy(model)
    return [fields(policy, rollout=f"r{number}") for number in range(5)]


def checked(made: list[RawRow], judge: Teacher | None, **options: Any) -> AuditReport:
    return audit(rows(made), judge, **{"tolerance": EXACT} | options)


def only(report: AuditReport, number: int) -> tuple[str, int | None, int | None]:
    """The problem of one row; all others have none."""
    assert [row.number for row in report.faulty_rows] == [number]
    (problem,) = report.rows[number - 1].problems
    assert report.failure_message is not None
    assert f"row {number}" in report.failure_message
    return problem.kind, problem.position, problem.turn


def test_what_is_in_order(made: list[RawRow], judge: Teacher) -> None:
    report = checked(made, judge)
    assert report.failure_message is None
    assert [row.verdict for row in report.rows] == ["clean"] * 5
    assert [row.compared for row in report.rows] == [18] * 5
    assert max(row.largest for row in report.rows) < EXACT
    assert report.policy is not None
    assert report.policy.kind == "same"


MODEL = small()
JUDGE = teacher(MODEL)
IN_ORDER = [fields(Policy(MODEL, seed=seed)) for seed in (1, 2)]


def plain(one: RawRow) -> np.ndarray:
    """One forward pass over a whole row: the log-probabilities of its response."""
    ids = torch.tensor([*one.prompt, *one.response])
    with torch.inference_mode():
        values = torch.log_softmax(MODEL(input_ids=ids[None], use_cache=False).logits[0], -1)
    return values[len(one.prompt) - 1 : -1].gather(1, ids[len(one.prompt) :, None])[:, 0].numpy()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(3, 2**32), turns=st.integers(2, 5), data=st.data())  # not those of IN_ORDER
def test_a_splice_is_found_where_it_is(seed: int, turns: int, data: st.DataObject) -> None:
    """The first token that was sampled in another context is the one that is told; unless it is as likely in both."""
    policy = Policy(MODEL, seed=seed)
    spliced = data.draw(st.integers(2, turns))
    made = [*IN_ORDER, fields(policy, turns, spliced=spliced)]
    off = np.abs(plain(made[2]) - np.array(made[2].logprobs)) > EXACT
    expected = next(at for at in range((spliced - 1) * 10, len(off)) if made[2].mask[at] and off[at])  # type: ignore[index]
    assert only(checked(made, JUDGE), 3) == ("splice", expected, spliced + (expected - (spliced - 1) * 10) // 10)


def test_another_prompt(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    broken[1].prompt = [*broken[1].prompt[:-1], (broken[1].prompt[-1] + 1) % VOCABULARY]
    assert only(checked(broken, judge), 2) == ("prompt", 0, 1)


def test_tokens_that_are_lost_within_a_turn(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    for array in (broken[3].response, broken[3].mask, broken[3].logprobs):
        assert isinstance(array, list)
        del array[12]
    assert only(checked(broken, judge), 4) == ("splice", 12, 2)


@pytest.mark.parametrize(("by", "position"), [(1, 6), (2, 6), (-1, 9)])
def test_a_mask_that_is_shifted(made: list[RawRow], judge: Teacher, by: int, position: int) -> None:
    broken = copy.deepcopy(made)
    for one in broken:
        one.mask = [*[0] * by, *list(one.mask or [])[:-by]] if by > 0 else [*list(one.mask or [])[-by:], *[0] * -by]
    report = checked(broken, judge)
    assert [row.verdict for row in report.rows] == ["mask_shifted"] * 5
    assert {row.problems[0].position for row in report.rows} == {position}


def test_context_that_is_trained(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    broken[0].mask = [1] * len(broken[0].response)
    assert only(checked(broken, judge), 1) == ("context_trained", 6, 1)
    broken = copy.deepcopy(made)
    one = broken[2]
    one.prompt, one.response = one.prompt[:-3], [*one.prompt[-3:], *one.response]
    one.mask, one.logprobs = [1, 1, 1, *(one.mask or [])], [0.0, 0.0, 0.0, *(one.logprobs or [])]
    assert only(checked(broken, judge), 3) == ("prompt_trained", 0, 1)


def test_log_probabilities_beside_their_tokens(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    for one in broken:
        assert one.logprobs is not None
        one.logprobs = [0.0, *one.logprobs[:-1]]
    report = checked(broken, judge)
    assert "shifted" in report.problem_counts
    assert report.problem_counts["shifted"] == 5


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_another_temperature(model: Any, judge: Teacher, temperature: float) -> None:
    policy = Policy(model, temperature)
    made = [fields(policy) for _ in range(4)] + [fields(policy, spliced=3)]
    report = checked(made, judge)
    assert report.policy is not None
    assert (report.policy.kind, report.policy.temperature) == ("temperature", temperature)
    assert report.problem_counts == {"temperature": 5, "splice": 1}  # and what is wrong besides
    assert f"--temperature {temperature}" in str(report.failure_message)
    told = checked(made, judge, temperature=temperature)
    assert only(told, 5) == ("splice", 20, 3)


def test_two_temperatures(made: list[RawRow], model: Any, judge: Teacher) -> None:
    """Most rows say which one it is, and the others are off then."""
    report = checked([*made, fields(Policy(model, 1.5, seed=3))], judge)
    assert only(report, 6) == ("prompt", 0, 1)
    hot = [fields(Policy(model, 1.5, seed=seed)) for seed in range(3)]
    report = checked([*hot, made[0]], judge)
    assert report.policy is not None
    assert (report.policy.kind, report.policy.temperature) == ("temperature", 1.5)
    assert [row.verdict for row in report.rows] == ["temperature"] * 3 + ["prompt"]


def test_a_distribution_that_was_cut(model: Any, judge: Teacher) -> None:
    policy = Policy(model, top_k=4)
    report = checked([fields(policy) for _ in range(4)], judge)
    assert report.policy is not None
    assert report.policy.kind == "truncated"


def test_other_weights(made: list[RawRow], model: Any) -> None:
    """A policy that is some steps older; and splices that stand out all the same."""
    later = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in later.parameters():
            weight.add_(torch.randn_like(weight) * 2e-4)
    policy = Policy(model, seed=7)
    report = checked([*made, fields(policy, spliced=2)], teacher(later))
    assert report.policy is not None
    assert report.policy.kind == "weights"
    assert report.problem_counts == {"weights": 6, "splice": 1}
    assert report.rows[5].problems[0].position == 10
    assert "other weights" in str(report.failure_message)
    assert checked(made, teacher(later), tolerance=0.1).failure_message is None


def test_an_engine_that_computes_roughly(made: list[RawRow], model: Any, judge: Teacher) -> None:
    """As in bf16: what differs no more than first turns do is in order, and splices are found in spite of it."""
    chance = np.random.default_rng(0)
    rough = [*copy.deepcopy(made), fields(Policy(model, seed=8), spliced=3), fields(Policy(model, seed=9), spliced=2)]
    for one in rough:
        assert one.logprobs is not None
        noise = chance.normal(0, 0.02, len(one.logprobs))
        one.logprobs = [value and min(0.0, value + more) for value, more in zip(one.logprobs, noise, strict=True)]
    report = checked(rough, judge, tolerance=0.1)
    assert report.policy is not None
    assert report.policy.kind == "same"
    found = {row.number: (row.verdict, row.problems[0].position, row.problems[0].turn) for row in report.faulty_rows}
    assert found == {6: ("splice", 20, 3), 7: ("splice", 10, 2)}
    assert checked(rough, judge).problem_counts == {"weights": 7, "splice": 2}  # fp32 would have been more exact


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "not_finite"),
        (-math.inf, "not_finite"),
        (None, "not_finite"),
        (-9999.0, "sentinel"),
        (0.5, "sentinel"),
    ],
)
def test_values_that_none_can_be(made: list[RawRow], judge: Teacher, value: float | None, kind: str) -> None:
    broken = copy.deepcopy(made)
    assert isinstance(broken[4].logprobs, list)
    broken[4].logprobs[21] = value
    for by in (judge, None):
        assert only(checked(broken, by), 5) == (kind, 21, 3)


def test_one_that_is_wrong(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    assert isinstance(broken[0].logprobs, list)
    broken[0].logprobs[1] -= 0.05
    assert only(checked(broken, judge), 1) == ("stray", 1, 1)


def test_arrays_that_do_not_fit(made: list[RawRow], judge: Teacher) -> None:
    broken = copy.deepcopy(made)
    broken[0].mask = [1] * 5
    assert only(checked(broken, judge), 1) == ("lengths", None, None)
    broken = copy.deepcopy(made)
    assert broken[1].logprobs is not None
    broken[1].logprobs = broken[1].logprobs[1:]
    assert only(checked(broken, judge), 2) == ("lengths", None, None)
    broken = copy.deepcopy(made)
    broken[2].mask = [0, 1] + [0] * (len(broken[2].prompt) - 2) + list(broken[2].mask or [])
    kind, *_ = only(checked(broken, judge), 3)
    assert kind == "prompt_trained"
    broken = copy.deepcopy(made)
    broken[3].logprobs = None
    assert only(checked(broken, judge), 4) == ("missing", None, None)
    broken = copy.deepcopy(made)
    assert isinstance(broken[3].response, list)
    broken[3].response[2] = VOCABULARY
    assert only(checked(broken, judge), 4) == ("not_in_vocabulary", 2, None)


def test_a_sampling_that_is_trained_twice(made: list[RawRow], model: Any, judge: Teacher) -> None:
    """The first turn by itself, and again in the row of the whole; also where nobody says that they belong together."""
    again = RawRow(made[1].prompt, made[1].response[:6], [1] * 6, list(made[1].logprobs or [])[:6], "r1")
    assert only(checked([*made, again], judge), 6) == ("repeated", 0, 1)
    long = fields(Policy(model, 1.5), turns=4)
    again = copy.deepcopy(long)
    again.response, again.mask, again.logprobs = (
        list(it or [])[:30] for it in (long.response, long.mask, long.logprobs)
    )
    assert only(checked([long, again], judge, temperature=1.5), 2) == ("repeated", 0, 1)


def test_the_same_words_by_chance(made: list[RawRow], judge: Teacher) -> None:
    """Two samples of a group that both say what is likely."""
    short = RawRow(made[0].prompt, made[0].response[:1], [1], list(made[0].logprobs or [])[:1], "a")
    other = copy.deepcopy(short)
    other.rollout = "b"
    assert checked([short, other], judge).failure_message is None
    other.rollout = "a"
    assert only(checked([short, other], judge), 2) == ("repeated", 0, 1)


def test_what_is_not_compared(made: list[RawRow], judge: Teacher) -> None:
    """Rows without a trained token are in order; rows with pictures are counted; versions are taken apart."""
    quiet, pictures = copy.deepcopy(made[0]), copy.deepcopy(made[1])
    quiet.mask, pictures.skip = [0] * len(quiet.response), "images"
    report = checked([quiet, pictures, *made[2:]], judge)
    assert report.failure_message is None
    assert [row.verdict for row in report.rows[:3]] == ["clean", "not compared", "clean"]
    assert report.skipped == {"images": 1}
    assert checked([pictures], judge).failure_message == "No log-probability could be compared."
    with pytest.raises(ConfigError, match="policy version"):
        checked(made, judge, version=3)
    versions = copy.deepcopy(made)
    for one in versions:
        one.versions = [3 if at < 10 else 4 for at in range(len(one.response))]
    assert {row.compared for row in checked(versions, judge, version=3).rows} == {6}

import pytest

from polar.errors import ConfigError
from polar.evaluators.base import Outcome
from polar.evaluators.session_completed import SessionCompleted
from polar.testing.grading import WorkFactory


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (Outcome("finished", 0, 1.0), 1.0),
        (Outcome("finished", 1, 1.0), 0.0),
        (Outcome("finished", None, 1.0, out_of_memory=True), 0.0),
        (Outcome("timeout", None, 1.0), 0.0),
        (Outcome("length", 0, 1.0), 0.0),
    ],
)
async def test_an_end_of_its_own_with_0_is_1(place: WorkFactory, outcome: Outcome, reward: float) -> None:
    work = await place.create_work()
    work.outcome = outcome
    assert (await SessionCompleted({}).evaluate(work)).reward == reward


def test_it_has_no_config() -> None:
    with pytest.raises(ConfigError, match=r"config\.x: there is no such field"):
        SessionCompleted({"x": 1})

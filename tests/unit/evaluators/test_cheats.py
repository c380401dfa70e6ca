"""The quickest of the agents that cheat with files, and honest ones, with real runtimes of this machine."""

import pytest

from polar.evaluators import load_evaluator
from polar.testing.grading import WorkFactory
from tests.attack.cheats_of_files import CHEATS, HONEST, Case

QUICK = [case for case in [*CHEATS, *HONEST] if case.quick]
PROVEN = {
    "a link to the expected file": "link_out",
    "a link through links": "link_out",
    "live: a link to the expected file": "link_out",
    "a module beside the grader's script": "grader_path",
}


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
async def test_honest_work_is_paid_and_no_cheat_is(place: WorkFactory, case: Case) -> None:
    work = await place.create_work(case.script, files=case.files, runtime=case.runtime, evaluator=case.evaluator)
    assert work.task.evaluator is not None
    verdict = await load_evaluator(work.task.evaluator).evaluate(work)
    assert (verdict.reward, verdict.reason) == (float(case.honest), None)
    proven = {one.kind for one in verdict.evidence if one.proven}
    if case.honest:
        assert not proven
    if (kind := PROVEN.get(case.name)) is not None:
        assert kind in proven


def test_enough_of_them_are_quick() -> None:
    assert sum(not case.honest for case in QUICK) >= 10

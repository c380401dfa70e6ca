"""What every evaluator must keep:

    class TestMine(EvaluatorContract):
        plugin = Mine
        config = {"expected": "teal"}
        solved = AgentRun("echo teal > answer.txt")
        failed = AgentRun("echo red > answer.txt")

`solved` and `failed` are sessions of which the first earns more; more of either are added by tests of one's own. Runs
are real: their scripts run in `local` runtimes, and the evaluator makes what runtimes it wants.
"""

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import pytest_asyncio

from polar.errors import ConfigError
from polar.evaluators.base import Evaluator, Outcome
from polar.records.session import Verdict
from polar.runtimes.local import Local
from polar.testing import leftovers
from polar.testing.contract import Contract, assert_helpful
from polar.testing.grading import FINISHED, AgentWork, WorkFactory

_NO_GATEWAY = "http://127.0.0.1:1"
_UNKNOWN_FIELD = "no_evaluator_has_this_field"
_HAVOC = {
    "workspace-is-empty": "rm -rf ..?* .[!.]* *",
    "files-are-folders": 'for f in *; do [ -f "$f" ] && rm "$f" && mkdir "$f"; done; true',
    "files-are-links": 'for f in *; do [ -f "$f" ] && ln -sf /etc/passwd "$f"; done; true',
    "files-are-binary": 'for f in *; do [ -f "$f" ] && head -c 100000 /dev/urandom > "$f"; done; true',
    "odd-names": "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\" -- -rf '$(id)'; mkfifo pipe; ln -s nowhere broken",
}
_KILLED = {
    "timeout": Outcome("timeout", None, 60.0),
    "length": Outcome("length", None, 60.0),
    "out-of-memory": Outcome("finished", 137, 1.0, out_of_memory=True),
}


class AgentRun(NamedTuple):
    """What an agent does in its workspace (a script), what it says last, and how its run ends."""

    script: str = ""
    answer: str = ""
    outcome: Outcome = FINISHED


class EvaluatorContract(Contract):
    kind = "evaluators"
    config: ClassVar[Mapping[str, Any]] = {}
    files: ClassVar[Mapping[str, str]] = {}  # of the workspace, before the agent
    solved: ClassVar[AgentRun]
    failed: ClassVar[AgentRun]
    same_again: ClassVar[bool] = True  # whether the same work earns the same each time

    @pytest_asyncio.fixture
    async def works(self, tmp_path: Path) -> AsyncIterator[WorkFactory]:
        backend = Local(tmp_path / "state", _NO_GATEWAY)
        mark = str(tmp_path / "state")
        try:
            yield WorkFactory(backend, tmp_path)
            async with asyncio.timeout(60):
                while leftovers.list_processes(mark, children=False):  # noqa: ASYNC110  processes tell nobody
                    await asyncio.sleep(0.02)
        finally:
            await backend.close()

    def make_evaluator(self) -> Evaluator:
        """With `config`. Override it for a config that is known only when the tests run."""
        made: Evaluator = self.plugin(copy.deepcopy(dict(self.config)))
        return made

    async def make_work(self, works: WorkFactory, run: AgentRun) -> AgentWork:
        work = await works.work(run.script, files=dict(self.files))
        work.answer, work.outcome = run.answer, run.outcome
        return work

    async def grade(self, works: WorkFactory, run: AgentRun) -> Verdict:
        return await self.make_evaluator().evaluate(await self.make_work(works, run))

    # Configuration

    def test_what_it_says_of_itself(self) -> None:
        evaluator = self.make_evaluator()
        assert isinstance(evaluator.needs_fresh_runtime, bool)
        assert all(isinstance(path, str) for path in getattr(evaluator, "private_paths", ()))

    def test_its_config_is_left_as_it_is(self) -> None:
        given = copy.deepcopy(dict(self.config))
        self.plugin(given)
        assert given == self.config

    def test_an_unknown_field_is_named(self) -> None:
        with pytest.raises(ConfigError, match=_UNKNOWN_FIELD) as error:
            self.plugin({**copy.deepcopy(dict(self.config)), _UNKNOWN_FIELD: 1})
        assert_helpful(error.value)

    # Verdicts

    async def test_a_solution_earns_more_than_a_failure(self, works: WorkFactory) -> None:
        solved, failed = await self.grade(works, self.solved), await self.grade(works, self.failed)
        for verdict in (solved, failed):
            assert_well_formed(verdict)
            assert verdict.reward is not None, verdict.reason
        assert solved.reward > failed.reward  # type: ignore[operator]

    async def test_the_same_work_earns_the_same(self, works: WorkFactory) -> None:
        if not self.same_again:
            pytest.skip(f"{self.plugin.__name__} does not promise this (same_again)")
        for run in (self.solved, self.failed):
            first, second = await self.grade(works, run), await self.grade(works, run)
            assert (first.reward, first.reason, first.turn_rewards) == (
                second.reward,
                second.reason,
                second.turn_rewards,
            )

    async def test_one_evaluator_grades_many(self, works: WorkFactory) -> None:
        """At the same time, and without remembering one when it grades another."""
        evaluator = self.make_evaluator()
        runs = [self.solved, self.failed, self.solved]
        graded = await asyncio.gather(*[evaluator.evaluate(await self.make_work(works, run)) for run in runs])
        assert graded[0].reward is not None
        assert graded[1].reward is not None
        assert graded[0].reward > graded[1].reward
        assert not self.same_again or graded[2].reward == graded[0].reward

    @pytest.mark.parametrize("havoc", _HAVOC.values(), ids=_HAVOC)
    async def test_nothing_that_an_agent_leaves_excuses_it(self, works: WorkFactory, havoc: str) -> None:
        """Whatever the agent did or failed to do is a reward, not a reason and not an exception."""
        best = (await self.grade(works, self.solved)).reward
        verdict = await self.grade(works, AgentRun(f"{self.failed.script or 'true'}\n{havoc}", self.failed.answer))
        assert_well_formed(verdict)
        assert verdict.reward is not None, verdict.reason
        assert best is not None
        assert verdict.reward <= best

    @pytest.mark.parametrize("outcome", _KILLED.values(), ids=_KILLED)
    async def test_a_run_that_was_cut_short_has_a_verdict(self, works: WorkFactory, outcome: Outcome) -> None:
        assert_well_formed(await self.grade(works, self.failed._replace(outcome=outcome)))

    # What it leaves behind

    async def test_the_agents_files_are_left_as_they_are(self, works: WorkFactory) -> None:
        work = await self.make_work(works, self.solved)
        workdir = work.task.runtime.workdir
        before = await work.agent_runtime.list_entries(workdir)
        await self.make_evaluator().evaluate(work)
        assert await work.agent_runtime.list_entries(workdir) == before

    async def test_it_can_be_cancelled(self, works: WorkFactory) -> None:
        """At any moment; what it started is gone when its runtimes are removed."""
        for moments in (0, 1, 5):
            work = await self.make_work(works, self.solved)
            grading = asyncio.create_task(self.make_evaluator().evaluate(work))
            for _ in range(moments):
                await asyncio.sleep(0)
            grading.cancel()
            (result,) = await asyncio.gather(grading, return_exceptions=True)
            assert isinstance(result, asyncio.CancelledError | Verdict)
            for runtime in (work.agent_runtime, *work.freshly_made):
                await runtime.remove()


def assert_well_formed(verdict: Verdict) -> None:
    """A finite reward, or a reason why there is none."""
    assert isinstance(verdict, Verdict)
    if verdict.reward is None:
        assert verdict.reason
    else:
        assert math.isfinite(verdict.reward)
        assert verdict.reason is None
    assert all(math.isfinite(reward) for reward in verdict.turn_rewards.values())

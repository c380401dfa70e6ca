"""The contract of every evaluator:

    class TestMine(EvaluatorContract):
        plugin = Mine
        config = {"expected": "teal"}
        solved = AgentRun("echo teal > answer.txt")
        failed = AgentRun("echo red > answer.txt")

`solved` and `failed` are sessions of which the first earns more; more of either are added by tests of one's own. Runs
are real: their scripts run in runtimes (`local` ones, unless `make_backend` says otherwise), and the evaluator creates
the runtimes it needs.
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
from polar.runtimes.base import RuntimeBackend
from polar.runtimes.local import Local
from polar.testing import leftovers
from polar.testing.contract import Contract, assert_helpful, requires
from polar.testing.grading import FINISHED, AgentWork, WorkFactory

_NO_GATEWAY = "http://127.0.0.1:1"
_UNKNOWN_FIELD = "no_evaluator_has_this_field"
_WORKSPACE_DAMAGE_SCRIPTS = {
    "workspace-is-empty": "rm -rf ..?* .[!.]* *",
    "files-are-folders": 'for f in *; do [ -f "$f" ] && rm "$f" && mkdir "$f"; done; true',
    "files-are-links": 'for f in *; do [ -f "$f" ] && ln -sf /etc/passwd "$f"; done; true',
    "files-are-binary": 'for f in *; do [ -f "$f" ] && head -c 100000 /dev/urandom > "$f"; done; true',
    "odd-names": "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\" -- -rf '$(id)'; mkfifo pipe; ln -s nowhere broken",
}
_CUT_SHORT_OUTCOMES = {
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
    is_deterministic: ClassVar[bool] = True  # the same work always earns the same reward

    @pytest_asyncio.fixture
    async def work_factory(self, tmp_path: Path) -> AsyncIterator[WorkFactory]:
        backend = self.make_backend(tmp_path / "state")
        mark = str(tmp_path / "state")
        try:
            yield WorkFactory(backend, tmp_path)
            async with asyncio.timeout(60):
                while leftovers.list_processes(mark, children=False):  # noqa: ASYNC110  nothing announces the end of a process
                    await asyncio.sleep(0.02)
        finally:
            await backend.close()

    def make_backend(self, folder: Path) -> RuntimeBackend:
        """Whose runtimes agents and graders run in. Override it for an evaluator that `local` is not enough for."""
        return Local(folder, _NO_GATEWAY)

    def make_evaluator(self) -> Evaluator:
        """An evaluator with `config`. Override this where the config is known only when the tests run."""
        made: Evaluator = self.plugin(copy.deepcopy(dict(self.config)))
        return made

    async def make_work(self, work_factory: WorkFactory, run: AgentRun) -> AgentWork:
        work = await work_factory.create_work(run.script, files=dict(self.files))
        work.answer, work.outcome = run.answer, run.outcome
        return work

    async def grade(self, work_factory: WorkFactory, run: AgentRun) -> Verdict:
        return await self.make_evaluator().evaluate(await self.make_work(work_factory, run))

    # Configuration

    def test_what_it_says_of_itself(self) -> None:
        evaluator = self.make_evaluator()
        assert isinstance(evaluator.needs_fresh_runtime, bool)
        assert all(isinstance(path, str) for path in getattr(evaluator, "private_paths", ()))

    def test_its_config_is_left_as_it_is(self) -> None:
        config = copy.deepcopy(dict(self.config))
        self.plugin(config)
        assert config == self.config

    def test_an_unknown_field_is_named(self) -> None:
        with pytest.raises(ConfigError, match=_UNKNOWN_FIELD) as error:
            self.plugin({**copy.deepcopy(dict(self.config)), _UNKNOWN_FIELD: 1})
        assert_helpful(error.value)

    # Verdicts

    async def test_a_solution_earns_more_than_a_failure(self, work_factory: WorkFactory) -> None:
        solved, failed = await self.grade(work_factory, self.solved), await self.grade(work_factory, self.failed)
        for verdict in (solved, failed):
            assert_well_formed(verdict)
            assert verdict.reward is not None, verdict.reason
        assert solved.reward > failed.reward  # type: ignore[operator]

    @requires("is_deterministic")
    async def test_the_same_work_earns_the_same(self, work_factory: WorkFactory) -> None:
        for run in (self.solved, self.failed):
            first, second = await self.grade(work_factory, run), await self.grade(work_factory, run)
            assert (first.reward, first.reason, first.turn_rewards) == (
                second.reward,
                second.reason,
                second.turn_rewards,
            )

    async def test_one_evaluator_grades_many(self, work_factory: WorkFactory) -> None:
        """Concurrently, and without state that leaks from one session to another."""
        evaluator = self.make_evaluator()
        runs = [self.solved, self.failed, self.solved]
        graded = await asyncio.gather(*[evaluator.evaluate(await self.make_work(work_factory, run)) for run in runs])
        assert graded[0].reward is not None
        assert graded[1].reward is not None
        assert graded[0].reward > graded[1].reward
        assert not self.is_deterministic or graded[2].reward == graded[0].reward

    @pytest.mark.parametrize("damage", _WORKSPACE_DAMAGE_SCRIPTS.values(), ids=_WORKSPACE_DAMAGE_SCRIPTS)
    async def test_nothing_that_an_agent_leaves_excuses_it(self, work_factory: WorkFactory, damage: str) -> None:
        """Whatever the agent did or failed to do is a reward, not a reason and not an exception."""
        best = (await self.grade(work_factory, self.solved)).reward
        verdict = await self.grade(
            work_factory, AgentRun(f"{self.failed.script or 'true'}\n{damage}", self.failed.answer)
        )
        assert_well_formed(verdict)
        assert verdict.reward is not None, verdict.reason
        assert best is not None
        assert verdict.reward <= best

    @pytest.mark.parametrize("outcome", _CUT_SHORT_OUTCOMES.values(), ids=_CUT_SHORT_OUTCOMES)
    async def test_a_run_that_was_cut_short_has_a_verdict(self, work_factory: WorkFactory, outcome: Outcome) -> None:
        assert_well_formed(await self.grade(work_factory, self.failed._replace(outcome=outcome)))

    # What it leaves behind

    async def test_the_agents_files_are_left_as_they_are(self, work_factory: WorkFactory) -> None:
        work = await self.make_work(work_factory, self.solved)
        workdir = work.task.runtime.workdir
        before = await work.agent_runtime.list_entries(workdir)
        await self.make_evaluator().evaluate(work)
        assert await work.agent_runtime.list_entries(workdir) == before

    async def test_it_can_be_cancelled(self, work_factory: WorkFactory) -> None:
        """At any moment. Whatever it started is gone once its runtimes are removed."""
        for loop_turns in (0, 1, 5):
            work = await self.make_work(work_factory, self.solved)
            grading = asyncio.create_task(self.make_evaluator().evaluate(work))
            for _ in range(loop_turns):
                await asyncio.sleep(0)
            grading.cancel()
            (result,) = await asyncio.gather(grading, return_exceptions=True)
            assert isinstance(result, asyncio.CancelledError | Verdict)
            for runtime in (work.agent_runtime, *work.fresh_runtimes):
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

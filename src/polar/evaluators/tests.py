"""`tests`: named tests that must pass, or keep passing, over what the agent changed.

The agent's changes are laid over a runtime that no agent has been in, without those to tests and to what configures
them (protecting.py): tests of the usual names, those that the task names, and the program that runs them. Then come the
grader's own files. The reward is 1 where every named test passed; a test that
isn't there has failed. With `partial` it is the share of `must_pass` that passed, times that of `must_keep`. Where
none is named, all tests that are found must pass.

    results = "pytest"      pytest, or unittest where `command` is such a program, run by reporter.py (default)
    results = "junit"       `command` is any program, which writes JUnit files to `result_files`

Code of the agent's runs in the process that runs the tests, unless `isolate` gives it one of its own. reporter.py says
what it can do there; with "junit", whoever can write a file can write results. Where it leaves no results at all, it
runs once more without the agent's work: if there are none then either and it ends well, or isn't found (126, 127), it
is broken (GraderError).
"""

import asyncio
import posixpath
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace
from pydantic import AliasChoices, Field, model_validator

from polar.evaluators import protecting, results, runs, settings
from polar.evaluators.base import GraderError, NotTaken, Work
from polar.evaluators.carrying import (
    Carrying,
    GradersFile,
    InsidePath,
    absolute,
    get,
    grader_places,
    put_over,
)
from polar.evaluators.links import below, printable
from polar.evaluators.protecting import Protected, Protecting
from polar.evaluators.results import BrokenResults, Run
from polar.evaluators.runs import Isolation, Plan, SignedRun
from polar.runtimes.base import Completed, Runtime
from polar.store.base import Evidence, Verdict

_BROKEN = (0, 126, 127)  # how a command ends, without results, that no agent could make write any
_DISCOVERED = "test*.py"  # by unittest
_WITH_VALUE = ("-k", "-p", "-c", "-o", "-W", "--ignore", "--deselect", "--cov", "--config-file", "--settings", "--tag")
"""Options of test runners whose next word is no test."""

_MB = 1 << 20
_MAX_LISTED = 1000  # failed tests in a verdict, where the task names none
_MAX_NAME = 1000  # characters of each


class TestsConfig(Protecting):
    command: str | list[str] = Field("python3 -m pytest", description="words, or a line as for a shell")
    results: Literal["pytest", "junit"] = "pytest"
    result_files: list[InsidePath] = Field([], description="of the workspace: JUnit files, as paths or globs")
    must_pass: list[str] = Field([], validation_alias=AliasChoices("must_pass", "FAIL_TO_PASS"))
    must_keep: list[str] = Field([], validation_alias=AliasChoices("must_keep", "PASS_TO_PASS"))
    files: list[GradersFile] = Field([], description="the grader's own, put over the agent's")
    isolate: bool = Field(False, description="run the code under test in a process of its own")
    isolate_equality: bool = Field(False, description="let its objects be compared by its own operators")
    partial: bool = False
    timeout_seconds: float = Field(1800, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    env: dict[str, str] = Field({}, description="besides the evaluator's")

    @model_validator(mode="after")
    def _fits(self) -> "TestsConfig":
        if (self.results == "junit") != bool(self.result_files):
            raise ValueError('`result_files` names the files that are read where `results` is "junit", and only then')
        if self.isolate and self.results == "junit":
            raise ValueError('`isolate` takes `results = "pytest"`: JUnit files can be written by the code under test')
        return self


class _Ran(Struct, frozen=True):
    """`command`, and the JUnit files that it left, on this machine."""

    completed: Completed
    files: list[Path]


class Tests:
    wants_fresh: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = settings.read(TestsConfig, config)
        self.private_paths = [file.target for file in self._config.files]
        self._named = [*self._config.must_pass, *self._config.must_keep]
        self._plan = None
        if self._config.results == "pytest":
            self._plan = runs.named_plan(self._config.command, "command")
            if self._plan.framework == "pytest" and not self._plan.args:
                self._plan.args.extend(results.files_of(self._named))

    async def evaluate(self, work: Work) -> Verdict:
        detail: dict[str, Any] = {}
        evidence: list[Evidence] = []
        try:
            run = await self._run(work, detail, evidence)
        except (NotTaken, BrokenResults) as error:
            evidence += getattr(error, "evidence", ())
            return Verdict(0.0, detail={**detail, "why": str(error)}, evidence=evidence)
        verdict = await asyncio.to_thread(self._verdict, run, detail)
        return replace(verdict, evidence=[*evidence, *verdict.evidence])

    async def _run(self, work: Work, detail: dict[str, Any], evidence: list[Evidence]) -> Run:
        runtime = await work.fresh()
        self._result_files(runtime)
        scratch = Path(tempfile.mkdtemp(dir=work.scratch))
        tests = None
        if self._plan is not None:
            isolation = Isolation(self._config.isolate_equality) if self._config.isolate else None
            env = self._env(work)
            tests = SignedRun(runtime, self._plan, env, scratch, named=self._named, isolation=isolation)
        log = work.logs / "tests.log"
        if tests is not None and not work.live:
            await tests.check(log)
        await self._lay(work, runtime, detail, evidence)
        await put_over(work, runtime, Carrying(files=self._config.files))
        if tests is not None:
            return await tests.run(log, self._config.timeout_seconds, stop=not work.live)
        ran = await self._run_command(work, runtime, log)
        if not ran.files:
            if not work.live:
                await self._check_itself(work)
            raise BrokenResults(f"The tests wrote no results, and ended with {ran.completed.exit_code}.")
        return await asyncio.to_thread(results.junit, ran.files)

    async def _lay(self, work: Work, runtime: Runtime, detail: dict[str, Any], evidence: list[Evidence]) -> None:
        config = self._config
        if work.live:
            detail["live"] = True
            if work.before is None:
                detail["not_put_back"] = "The workspace was too large to keep: protected files are the agent's."
                return
        result_files = self._result_files(runtime)
        protected = self._choose_protected(work, runtime, result_files)
        taken = await protecting.take(work, runtime, protected, config, self._env(work))
        evidence += taken.evidence
        work.evidence.extend(taken.evidence)
        if stale := await asyncio.to_thread(_found, taken.before, result_files):
            raise GraderError(f"config.result_files: {stale[0].name} is there before any test is run; remove it.")
        detail["dropped"] = [printable(change.path) for change in taken.dropped]
        if work.live:
            await protecting.put_back(taken, runtime)
        else:
            await protecting.lay(taken, runtime)

    def _choose_protected(self, work: Work, runtime: Runtime, result_files: list[str]) -> Protected:
        config, workdir = self._config, runtime.spec.workdir
        places = grader_places(work, runtime, Carrying(files=config.files))

        def below_workdir(paths: list[str]) -> list[str]:
            return [posixpath.relpath(path, workdir) for path in paths if below(path, workdir) and path != workdir]

        return Protected(
            Protecting(protected=[*config.protected, *result_files], allowed=config.allowed),
            files=below_workdir(places.files),
            folders=below_workdir(places.folders),
            named=named_tests(self._plan, self._named),
            globs=[_DISCOVERED] if _is_discovery(self._plan) else [],
        )

    async def _run_command(self, work: Work, runtime: Runtime, log: Path) -> _Ran:
        command = self._config.command
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        done = await runtime.run(argv, env=self._env(work), timeout=self._config.timeout_seconds, output=log)
        if not work.live:
            await runtime.stop()
        runs.check_ended(done)
        after = Path(tempfile.mkdtemp(dir=work.scratch)) / "after"
        try:
            await get(runtime, runtime.spec.workdir, after, self._config.max_mb * _MB)
        except NotTaken as error:
            raise BrokenResults(f"The workspace can't be read after the tests. {error}") from error
        return _Ran(done, await asyncio.to_thread(_found, after, self._result_files(runtime)))

    async def _check_itself(self, work: Work) -> None:
        """Raises GraderError where the command writes no results, whatever the agent did."""
        runtime = await work.fresh()
        await put_over(work, runtime, Carrying(files=self._config.files))
        try:
            ran = await self._run_command(work, runtime, work.logs / "tests-without-agent.log")
        except BrokenResults:
            return  # tests may well wait for what nobody made
        if not ran.files and (code := ran.completed.exit_code) in _BROKEN:
            why = "ends with 0 and writes no result_files" if code == 0 else f"can't be run ({code})"
            raise GraderError(
                f"config.command {why}, without the agent's work, either; tests-without-agent.log has why."
            )

    def _result_files(self, runtime: Runtime) -> list[str]:
        """As globs of the workspace."""
        workdir = runtime.spec.workdir
        globs = [posixpath.relpath(absolute(runtime, glob), workdir) for glob in self._config.result_files]
        for named, glob in zip(self._config.result_files, globs, strict=True):
            if glob.split("/")[0] in (".", ".."):
                raise GraderError(f"config.result_files: {named} is not below {workdir}, where they must be written.")
        return globs

    def _env(self, work: Work) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env

    def _verdict(self, run: Run, detail: dict[str, Any]) -> Verdict:
        if not self._named:
            share = run.share
            failed = sorted(result.names[0][:_MAX_NAME] for result in run.results if result.outcome == "failed")
            detail["failed"] = failed[:_MAX_LISTED]
            if len(failed) > _MAX_LISTED:
                detail["failed_count"] = len(failed)
        else:
            wanted = results.judge(run.results, self._config.must_pass)
            kept = results.judge(run.results, self._config.must_keep)
            share = wanted.share * kept.share
            detail |= {"must_pass_failed": wanted.failed, "must_keep_failed": kept.failed}
        reward = share if self._config.partial else float(share == 1.0)
        return Verdict(reward, detail=detail, evidence=run.evidence)


def named_tests(plan: Plan | None, names: list[str]) -> list[str]:
    """The tests that a task names, with those, and the program that runs them, among the words of its command. None
    where doctests are run, which stand in the agent's own code."""
    words = [] if plan is None else plan.args
    if any(word.startswith("--doctest") for word in words):
        return []
    taken = {at + 1 for at, word in enumerate(words) if word in _WITH_VALUE}
    free = [word for at, word in enumerate(words) if at not in taken and not word.startswith("-")]
    if plan is not None and plan.framework == "pytest":
        free = [word for word in free if word.partition("::")[0].endswith(".py")]
    return [*names, *free]


def _is_discovery(plan: Plan | None) -> bool:
    """Whether unittest looks for files by its own pattern."""
    if plan is None or plan.args[:2] != ["-m", "unittest"]:
        return False
    return "discover" in plan.args or all(word.startswith("-") for word in plan.args[2:])


def _found(top: Path, globs: list[str]) -> list[Path]:
    """Plain files; links lead nowhere."""
    found = {file for glob in globs for file in top.glob(glob)}
    return sorted(file for file in found if file.is_file() and not file.is_symlink())

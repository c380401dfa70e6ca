"""`tests`: named tests that must pass, or keep passing, over what the agent changed.

The agent's changes are laid over a runtime that no agent has been in, without those to tests and to what configures
them (transfer/protected_files.py): tests of the usual names, those that the task names, and the program that runs them.
Then come the grader's own files. The reward is 1 where every named test passed; a test that isn't there has failed.
With `partial` it is the share of `must_pass` that passed, times that of `must_keep`. Where none is named, all tests
that are found must pass.

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

from polar.evaluators import results, signed_run
from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError, parse_config
from polar.evaluators.results import BrokenResultsError, RunResults
from polar.evaluators.signed_run import Isolation, RunnerCommand, SignedRun
from polar.evaluators.transfer import protected_files
from polar.evaluators.transfer.links import escape_path, is_below
from polar.evaluators.transfer.protected_files import ProtectedFiles, ProtectionConfig
from polar.evaluators.transfer.workspace import (
    GraderFile,
    RuntimePath,
    TransferConfig,
    find_grader_paths,
    get,
    to_absolute,
    upload_grader_files,
)
from polar.records.session import Evidence, Verdict
from polar.runtimes.base import CommandResult, Runtime

_BROKEN_EXIT_CODES = (0, 126, 127)  # how a command ends, without results, that no agent could make write any
_DISCOVERY_GLOB = "test*.py"  # by unittest
_OPTIONS_WITH_VALUE = (
    "-k",
    "-p",
    "-c",
    "-o",
    "-W",
    "--ignore",
    "--deselect",
    "--cov",
    "--config-file",
    "--settings",
    "--tag",
)
"""Options of test runners whose next word is no test."""

_MB = 1 << 20
_MAX_LISTED = 1000  # failed tests in a verdict, where the task names none
_MAX_NAME = 1000  # characters of each


class ProjectTestsConfig(ProtectionConfig):
    command: str | list[str] = Field("python3 -m pytest", description="words, or a line as for a shell")
    results: Literal["pytest", "junit"] = "pytest"
    result_files: list[RuntimePath] = Field([], description="of the workspace: JUnit files, as paths or globs")
    must_pass: list[str] = Field([], validation_alias=AliasChoices("must_pass", "FAIL_TO_PASS"))
    must_keep: list[str] = Field([], validation_alias=AliasChoices("must_keep", "PASS_TO_PASS"))
    files: list[GraderFile] = Field([], description="the grader's own, put over the agent's")
    isolate: bool = Field(False, description="run the code under test in a process of its own")
    isolate_equality: bool = Field(False, description="let its objects be compared by its own operators")
    partial: bool = False
    timeout_seconds: float = Field(1800, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    env: dict[str, str] = Field({}, description="besides the evaluator's")

    @model_validator(mode="after")
    def _check_results(self) -> "ProjectTestsConfig":
        if (self.results == "junit") != bool(self.result_files):
            raise ValueError('`result_files` names the files that are read where `results` is "junit", and only then')
        if self.isolate and self.results == "junit":
            raise ValueError('`isolate` takes `results = "pytest"`: JUnit files can be written by the code under test')
        return self


class _JUnitRun(Struct, frozen=True):
    """`command`, and the JUnit files that it left, on this machine."""

    completed: CommandResult
    files: list[Path]


class ProjectTests:
    needs_fresh_runtime: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(ProjectTestsConfig, config)
        self.private_paths = [file.target for file in self._config.files]
        self._named_tests = [*self._config.must_pass, *self._config.must_keep]
        self._runner_command = None
        if self._config.results == "pytest":
            self._runner_command = signed_run.require_command(self._config.command, "command")
            if self._runner_command.framework == "pytest" and not self._runner_command.args:
                self._runner_command.args.extend(results.list_node_files(self._named_tests))

    async def evaluate(self, work: GradingContext) -> Verdict:
        detail: dict[str, Any] = {}
        evidence: list[Evidence] = []
        try:
            run = await self._run(work, detail, evidence)
        except (UngradableWorkError, BrokenResultsError) as error:
            evidence += getattr(error, "evidence", ())
            return Verdict(0.0, detail={**detail, "why": str(error)}, evidence=evidence)
        verdict = await asyncio.to_thread(self._make_verdict, run, detail)
        return replace(verdict, evidence=[*evidence, *verdict.evidence])

    async def _run(self, work: GradingContext, detail: dict[str, Any], evidence: list[Evidence]) -> RunResults:
        runtime = await work.create_fresh_runtime()
        self._list_result_globs(runtime)
        scratch = Path(tempfile.mkdtemp(dir=work.scratch))
        tests = None
        if self._runner_command is not None:
            isolation = Isolation(self._config.isolate_equality) if self._config.isolate else None
            env = self._build_env(work)
            tests = SignedRun(
                runtime, self._runner_command, env, scratch, named_tests=self._named_tests, isolation=isolation
            )
        log = work.logs / "tests.log"
        if tests is not None and not work.live:
            await tests.check(log)
        await self._apply_changes(work, runtime, detail, evidence)
        await upload_grader_files(work, runtime, TransferConfig(files=self._config.files))
        if tests is not None:
            return await tests.run(log, self._config.timeout_seconds, stop=not work.live)
        ran = await self._run_command(work, runtime, log)
        if not ran.files:
            if not work.live:
                await self._check_grader(work)
            raise BrokenResultsError(f"The tests wrote no results, and ended with {ran.completed.exit_code}.")
        return await asyncio.to_thread(results.parse_junit, ran.files)

    async def _apply_changes(
        self, work: GradingContext, runtime: Runtime, detail: dict[str, Any], evidence: list[Evidence]
    ) -> None:
        config = self._config
        if work.live:
            detail["live"] = True
            if work.initial_workspace is None:
                detail["not_put_back"] = "The workspace was too large to keep: protected files are the agent's."
                return
        result_files = self._list_result_globs(runtime)
        protected = self._choose_protected(work, runtime, result_files)
        taken = await protected_files.diff_workspace(work, runtime, protected, config, self._build_env(work))
        evidence += taken.evidence
        work.evidence.extend(taken.evidence)
        if stale := await asyncio.to_thread(_find_files, taken.before, result_files):
            raise GraderError(f"config.result_files: {stale[0].name} is there before any test is run; remove it.")
        detail["dropped"] = [escape_path(change.path) for change in taken.dropped]
        if work.live:
            await protected_files.restore_protected(taken, runtime)
        else:
            await protected_files.apply_changes(taken, runtime)

    def _choose_protected(self, work: GradingContext, runtime: Runtime, result_files: list[str]) -> ProtectedFiles:
        config, workdir = self._config, runtime.spec.workdir
        places = find_grader_paths(work, runtime, TransferConfig(files=config.files))

        def below_workdir(paths: list[str]) -> list[str]:
            return [posixpath.relpath(path, workdir) for path in paths if is_below(path, workdir) and path != workdir]

        return ProtectedFiles(
            ProtectionConfig(protected=[*config.protected, *result_files], allowed=config.allowed),
            files=below_workdir(places.files),
            folders=below_workdir(places.folders),
            named=list_named_tests(self._runner_command, self._named_tests),
            globs=[_DISCOVERY_GLOB] if _is_discovery(self._runner_command) else [],
        )

    async def _run_command(self, work: GradingContext, runtime: Runtime, log: Path) -> _JUnitRun:
        command = self._config.command
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        done = await runtime.run(argv, env=self._build_env(work), timeout=self._config.timeout_seconds, output=log)
        if not work.live:
            await runtime.stop()
        signed_run.check_completed(done)
        after = Path(tempfile.mkdtemp(dir=work.scratch)) / "after"
        try:
            await get(runtime, runtime.spec.workdir, after, self._config.max_mb * _MB)
        except UngradableWorkError as error:
            raise BrokenResultsError(f"The workspace can't be read after the tests. {error}") from error
        return _JUnitRun(done, await asyncio.to_thread(_find_files, after, self._list_result_globs(runtime)))

    async def _check_grader(self, work: GradingContext) -> None:
        """Raises GraderError where the command writes no results, whatever the agent did."""
        runtime = await work.create_fresh_runtime()
        await upload_grader_files(work, runtime, TransferConfig(files=self._config.files))
        try:
            ran = await self._run_command(work, runtime, work.logs / "tests-without-agent.log")
        except BrokenResultsError:
            return  # tests may well wait for what nobody made
        if not ran.files and (code := ran.completed.exit_code) in _BROKEN_EXIT_CODES:
            why = "ends with 0 and writes no result_files" if code == 0 else f"can't be run ({code})"
            raise GraderError(
                f"config.command {why}, without the agent's work, either; tests-without-agent.log has why."
            )

    def _list_result_globs(self, runtime: Runtime) -> list[str]:
        """As globs of the workspace."""
        workdir = runtime.spec.workdir
        globs = [posixpath.relpath(to_absolute(runtime, glob), workdir) for glob in self._config.result_files]
        for named, glob in zip(self._config.result_files, globs, strict=True):
            if glob.split("/")[0] in (".", ".."):
                raise GraderError(f"config.result_files: {named} is not below {workdir}, where they must be written.")
        return globs

    def _build_env(self, work: GradingContext) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env

    def _make_verdict(self, run: RunResults, detail: dict[str, Any]) -> Verdict:
        if not self._named_tests:
            share = run.passed_share
            failed = sorted(result.names[0][:_MAX_NAME] for result in run.results if result.outcome == "failed")
            detail["failed"] = failed[:_MAX_LISTED]
            if len(failed) > _MAX_LISTED:
                detail["failed_count"] = len(failed)
        else:
            wanted = results.match_named_tests(run.results, self._config.must_pass)
            kept = results.match_named_tests(run.results, self._config.must_keep)
            share = wanted.passed_share * kept.passed_share
            detail |= {"must_pass_failed": wanted.failed, "must_keep_failed": kept.failed}
        reward = share if self._config.partial else float(share == 1.0)
        return Verdict(reward, detail=detail, evidence=run.evidence)


def list_named_tests(command: RunnerCommand | None, names: list[str]) -> list[str]:
    """The tests that a task names, with those, and the program that runs them, among the words of its command. None
    where doctests are run, which stand in the agent's own code."""
    words = [] if command is None else command.args
    if any(word.startswith("--doctest") for word in words):
        return []
    taken = {at + 1 for at, word in enumerate(words) if word in _OPTIONS_WITH_VALUE}
    free = [word for at, word in enumerate(words) if at not in taken and not word.startswith("-")]
    if command is not None and command.framework == "pytest":
        free = [word for word in free if word.partition("::")[0].endswith(".py")]
    return [*names, *free]


def _is_discovery(command: RunnerCommand | None) -> bool:
    """Whether unittest looks for files by its own pattern."""
    if command is None or command.args[:2] != ["-m", "unittest"]:
        return False
    return "discover" in command.args or all(word.startswith("-") for word in command.args[2:])


def _find_files(top: Path, globs: list[str]) -> list[Path]:
    """Plain files; links lead nowhere."""
    found = {file for glob in globs for file in top.glob(glob)}
    return sorted(file for file in found if file.is_file() and not file.is_symlink())

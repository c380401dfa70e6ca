"""`swebench`: a row of SWE-bench, with the dataset's own field names.

What the agent changed, without tests and what configures them, is the model patch; it is kept with the session. A
runtime that no agent has been in gets `test_patch` first, which must apply there, and then the model's changes: they
touch none of the same files, so that nothing can keep them from applying, and an unapplicable `test_patch` is never
the agent's doing. The session is resolved (reward 1) where every test of FAIL_TO_PASS and PASS_TO_PASS passes.

Tests are run by reporter.py: pytest (the default), or a program like Django's runtests.py, whose tests are found by the
names that unittest prints ("test_a (module.Class)", or the first line of the docstring).
"""

import asyncio
import json
import posixpath
import tempfile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from pydantic import AliasChoices, BeforeValidator, Field

from polar.errors import ConfigError
from polar.evaluators import results, signed_run
from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError, parse_config
from polar.evaluators.patches import MAX_PATCH_BYTES, list_patch_paths, make_patch
from polar.evaluators.project_tests import list_named_tests
from polar.evaluators.results import BrokenResultsError, RunResults
from polar.evaluators.signed_run import RunnerCommand, SignedRun
from polar.evaluators.transfer import protected_files
from polar.evaluators.transfer.links import escape_path
from polar.evaluators.transfer.protected_files import ProtectedFiles, ProtectionConfig, WorkspaceDiff
from polar.records.session import Evidence, Verdict
from polar.runtimes.base import Runtime

_APPLY_SECONDS = 120.0
_MAX_LOG_TAIL_CHARS = 1000
_FILES_PLACEHOLDER = "{files}"

# A repository of another user's is refused otherwise. `patch` where there is no git.
_APPLY_SCRIPT = (
    'if command -v git >/dev/null; then git -c safe.directory="*" apply -v --whitespace=nowarn - ; '
    "else patch --batch --forward --fuzz=5 -p1; fi"
)


def _parse_list(value: Any) -> Any:
    """The dataset has lists as JSON in a string."""
    return json.loads(value) if isinstance(value, str) else value


NameList = Annotated[list[str], BeforeValidator(_parse_list)]


class SweBenchConfig(ProtectionConfig):
    instance_id: str
    test_patch: str = Field(min_length=1)
    fail_to_pass: NameList = Field(min_length=1, validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: NameList = Field([], validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    test_command: str | list[str] = Field("python3 -m pytest {files}", description="{files}: those of test_patch")
    timeout_seconds: float = Field(1800, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    env: dict[str, str] = Field({}, description="besides the evaluator's")
    repo_dir: str | None = Field(None, description="where the repository is: the task's runtime.workdir")

    # The rest of a row, which says nothing about how it is graded.
    repo: str | None = None
    base_commit: str | None = None
    patch: str | None = None
    version: str | None = None
    environment_setup_commit: str | None = None
    hints_text: str | None = None
    problem_statement: str | None = None
    created_at: str | None = None
    difficulty: str | None = None


class SweBench:
    needs_fresh_runtime: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(SweBenchConfig, config)
        self._patched_paths = list_patch_paths(self._config.test_patch)
        if not self._patched_paths:
            raise ConfigError("config.test_patch: it names no file; it must be in git's format.")
        self._runner_command = _insert_files(
            signed_run.require_command(self._config.test_command, "test_command"), self._list_test_files()
        )
        named = list_named_tests(self._runner_command, [*self._config.fail_to_pass, *self._config.pass_to_pass])
        self._protected = ProtectedFiles(self._config, files=self._patched_paths, named=named)

    def _list_test_files(self) -> list[str]:
        """Those that are there once the patch is applied, and have tests."""
        support = ("conftest.py", "__init__.py")
        wanted = [
            path for path in list_patch_paths(self._config.test_patch, existing_only=True) if path.endswith(".py")
        ]
        named = results.list_node_files([*self._config.fail_to_pass, *self._config.pass_to_pass])
        return list(dict.fromkeys([path for path in wanted if PurePosixPath(path).name not in support] + named))

    async def evaluate(self, work: GradingContext) -> Verdict:
        detail: dict[str, Any] = {"instance_id": self._config.instance_id}
        evidence: list[Evidence] = []
        try:
            run = await self._run(work, detail, evidence)
        except (UngradableWorkError, BrokenResultsError) as error:
            evidence += getattr(error, "evidence", ())
            return Verdict(0.0, detail={**detail, "resolved": False, "why": str(error)}, evidence=evidence)
        fail_to_pass = await asyncio.to_thread(results.match_named_tests, run.results, self._config.fail_to_pass)
        pass_to_pass = await asyncio.to_thread(results.match_named_tests, run.results, self._config.pass_to_pass)
        resolved = not fail_to_pass.failed and not pass_to_pass.failed
        failed = {"FAIL_TO_PASS_failed": fail_to_pass.failed, "PASS_TO_PASS_failed": pass_to_pass.failed}
        evidence += run.evidence
        return Verdict(float(resolved), detail={**detail, "resolved": resolved, **failed}, evidence=evidence)

    async def _run(self, work: GradingContext, detail: dict[str, Any], evidence: list[Evidence]) -> RunResults:
        if work.live:
            raise GraderError("swebench needs a fresh runtime: leave `refresh_runtime` at true.")
        fresh = await work.create_fresh_runtime()
        diff = await protected_files.diff_workspace(work, fresh, self._protected, self._config, self._build_env(work))
        evidence += diff.evidence
        work.evidence.extend(diff.evidence)
        detail["dropped"] = [escape_path(change.path) for change in diff.dropped]
        detail["left_out"] = await asyncio.to_thread(_write, diff, work.logs / "model.patch")
        if not diff.kept:
            raise UngradableWorkError("The model patch is empty.")
        log = work.logs / "swebench.log"
        tests = SignedRun(fresh, self._runner_command, self._build_env(work), Path(tempfile.mkdtemp(dir=work.scratch)))
        await tests.check(log)
        await self._apply_test_patch(fresh, log)
        await protected_files.apply_changes(diff, fresh)
        return await tests.run(log, self._config.timeout_seconds)

    async def _apply_test_patch(self, fresh: Runtime, log: Path) -> None:
        repo = self._config.repo_dir
        if repo is not None and posixpath.normpath(repo) != fresh.spec.workdir:
            raise GraderError(f"config.repo_dir is {repo}, the workspace {fresh.spec.workdir}: set runtime.workdir.")
        text = self._config.test_patch.encode()
        text += b"" if text.endswith(b"\n") else b"\n"
        done = await fresh.run(["/bin/sh", "-c", _APPLY_SCRIPT], stdin=text, timeout=_APPLY_SECONDS, output=log)
        if done.exit_code != 0:
            log_tail = (await asyncio.to_thread(log.read_text, errors="replace"))[-_MAX_LOG_TAIL_CHARS:]
            raise GraderError(f"config.test_patch does not apply, before anything of the agent's is there: {log_tail}")

    def _build_env(self, work: GradingContext) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env


def _insert_files(command: RunnerCommand, files: list[str]) -> RunnerCommand:
    args = [word for arg in command.args for word in (files if arg == _FILES_PLACEHOLDER else [arg])]
    return replace(command, args=args)


def _write(diff: WorkspaceDiff, file: Path) -> list[str]:
    """Keeps the model patch; what is too large for it, though it is graded."""
    patch = make_patch(diff.before, diff.after, diff.kept, max_file_bytes=MAX_PATCH_BYTES)
    file.write_bytes(patch.text)
    return [escape_path(path) for path in patch.left_out]

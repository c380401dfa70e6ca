"""`harbor`: a Harbor task's tests, run over what the agent left of the whole machine.

Harbor's tests look at more than the workspace. They run in a runtime that no agent has been in, over those of the
agent's changes that count (transfer/system.py): the workspace, folders of the root that are not the system's, and the
paths that the task names in `system_paths`, for what it is about in /etc, /opt, /usr and the like. What programs read
or load by themselves is as the task prepared it. The tests come to /tests; bash runs /tests/test.sh in the workspace,
and reads it as a whole before its first command, so that code of the agent's can't add to it meanwhile. The reward is
read from outside, when every process is dead: /logs/verifier/reward.json, or else reward.txt, as in Harbor. Of several
named numbers it is `reward`, or the one that `reward_key` names.

Where there is no reward Harbor has an error. Here the tests run once more where no agent has been. If they give none
there either and end well, or can't be started (126, 127), the task's grader is broken (GraderError); otherwise it was
the agent's doing, 0: tests that fail or wait for what nobody made may well end without a reward.

pytest finds a configuration in /tests before any of the agent's. What remains: whatever the tests themselves read or
run in the workspace (a conftest.py there, when they run pytest there). And code of the agent's that the tests run is
the same user as they are: it can read /tests and write the reward.
"""

import asyncio
import contextlib
import json
import math
import posixpath
import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Struct
from pydantic import AfterValidator, AliasChoices, Field, field_validator

from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError, parse_config
from polar.evaluators.transfer.system import transfer_changes
from polar.evaluators.transfer.workspace import explain_put_error, get, imports_from_cwd, remove_folder
from polar.records.session import Evidence, Verdict
from polar.records.task import RequestModel
from polar.runtimes.base import CommandResult, CorruptedRuntimeError, Runtime, SandboxError, TransferTooLargeError

_TESTS_FOLDER = "/tests"
_RESULTS_FOLDER = "/logs/verifier"
_EXIT_SIGNAL_BASE = 128  # and more: the signal's number
_BROKEN_EXIT_CODES = (0, 126, 127)  # how tests end, without a reward, that no agent could pass: well, or never begun
_MAX_REWARD_BYTES = 64 * 1024
_MAX_LOG_BYTES = 64 << 20
_PYTEST_FILES = ("pytest.ini", ".pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg")


def _validate_absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/") or posixpath.normpath(path) == "/":
        raise ValueError(f"{path!r} must be an absolute path below the root, without `..`")
    return posixpath.normpath(path)


SystemPath = Annotated[str, AfterValidator(_validate_absolute)]


class HarborConfig(RequestModel):
    tests: str = Field(description="the task's folder tests/, absolute")
    timeout_seconds: float = Field(600, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    env: dict[str, str] = Field({}, description="besides the evaluator's")
    reward_key: str = "reward"
    system_paths: list[SystemPath] = Field([], description="paths of system folders where the agent's changes count")
    max_mb: int = Field(1024, gt=0, description="of what the agent changed")

    @field_validator("tests")
    @classmethod
    def _check_tests(cls, tests: str) -> str:
        if not Path(tests).is_absolute():
            raise ValueError("it must be an absolute path")
        return tests


class _HarborRun(Struct, frozen=True):
    completed: CommandResult
    rewards: dict[str, float]
    failure: str | None = None  # there is no reward


class Harbor:
    needs_fresh_runtime: ClassVar[bool] = True
    private_paths: ClassVar[tuple[str, ...]] = (_TESTS_FOLDER, _RESULTS_FOLDER)
    paths: ClassVar[tuple[str, ...]] = ("tests",)  # of its config, on this machine

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(HarborConfig, config)

    async def evaluate(self, work: GradingContext) -> Verdict:
        tests = Path(self._config.tests)
        if not (tests / "test.sh").is_file():
            raise GraderError(f"config.tests: there is no {tests / 'test.sh'}.")
        if work.agent_runtime.path(_TESTS_FOLDER) != _TESTS_FOLDER:
            raise GraderError("harbor needs a runtime with a root of its own: bubblewrap, docker or podman, not local.")
        evidence: list[Evidence] = []
        detail: dict[str, Any] = {"live": True} if work.live else {}
        try:
            runtime = work.agent_runtime
            if not work.live:
                own = [_TESTS_FOLDER, _RESULTS_FOLDER]
                from_workdir = imports_from_cwd(
                    await asyncio.to_thread((tests / "test.sh").read_text, errors="replace")
                )
                counted, most = self._config.system_paths, self._config.max_mb << 20
                layer = await transfer_changes(
                    work, counted, own, most, env=self._build_env(work), from_workdir=from_workdir
                )
                runtime, evidence = layer.runtime, layer.evidence
                work.evidence.extend(evidence)
                detail |= {"not_counted": layer.not_counted} if layer.not_counted else {}
            ran = await self._run(work, runtime, "harbor")
        except (UngradableWorkError, CorruptedRuntimeError) as error:
            return Verdict(0.0, detail=detail | {"why": str(error)}, evidence=evidence)
        detail |= {"exit_code": ran.completed.exit_code, "seconds": ran.completed.seconds}
        if ran.failure is None:
            reward = ran.rewards[self._config.reward_key]
            return Verdict(reward, detail=detail | {"rewards": ran.rewards}, evidence=evidence)
        if not work.live:
            await self._check_grader(work)
        return Verdict(0.0, detail=detail | {"why": ran.failure}, evidence=evidence)

    async def _check_grader(self, work: GradingContext) -> None:
        """Raises GraderError where the tests give no reward, whatever the agent does."""
        ran = await self._run(work, await work.create_fresh_runtime(), "harbor-without-agent")
        if ran.failure is not None and ran.completed.exit_code in _BROKEN_EXIT_CODES:
            raise GraderError(
                f"The tests of {self._config.tests} give no reward without the agent, either: {ran.failure}"
            )

    async def _run(self, work: GradingContext, runtime: Runtime, name: str) -> _HarborRun:
        scratch = Path(tempfile.mkdtemp(dir=work.scratch))
        await self._upload_tests(work, runtime, scratch)
        completed = await runtime.run(
            ["/bin/bash", "-c", '. "$0"', f"{_TESTS_FOLDER}/test.sh"],
            env=self._build_env(work),
            timeout=self._config.timeout_seconds,
            output=work.logs / f"{name}.log",
        )
        if completed.exit_code is None and not completed.timed_out and not completed.out_of_memory:
            raise SandboxError("The grader's runtime was stopped while its tests ran.")
        if not work.live:
            await runtime.stop()
        with contextlib.suppress(UngradableWorkError):  # more than is kept, or nothing
            await get(runtime, _RESULTS_FOLDER, work.logs / f"{name}-verifier", _MAX_LOG_BYTES)
        if completed.timed_out:
            return _HarborRun(completed, {}, "The tests took too long.")
        if completed.out_of_memory:
            return _HarborRun(completed, {}, "The tests ran out of memory.")
        if completed.exit_code is not None and completed.exit_code > _EXIT_SIGNAL_BASE:
            # By whom else than by what they ran: a reward that they left is not to be trusted.
            return _HarborRun(completed, {}, "The tests were killed.")
        return await self._read_result(runtime, completed, scratch)

    def _build_env(self, work: GradingContext) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env

    async def _upload_tests(self, work: GradingContext, runtime: Runtime, scratch: Path) -> None:
        """The tests and an empty folder for what they tell, in place of whatever is there."""
        (scratch / "results").mkdir()
        (scratch / "results").chmod(0o777)
        try:
            await _ensure_real_folder(runtime, "/logs", scratch)
            for source, inside in ((Path(self._config.tests), _TESTS_FOLDER), (scratch / "results", _RESULTS_FOLDER)):
                await remove_folder(runtime, inside)
                await runtime.put(source, inside)
            if not any((Path(self._config.tests) / name).exists() for name in _PYTEST_FILES):
                await runtime.put(b"[pytest]\n", f"{_TESTS_FOLDER}/pytest.ini")
        except OSError as error:
            raise explain_put_error(runtime, _TESTS_FOLDER, error, live=work.live) from error

    async def _read_result(self, runtime: Runtime, completed: CommandResult, scratch: Path) -> _HarborRun:
        for name in ("reward.json", "reward.txt"):
            here = scratch / name
            try:
                await get(runtime, f"{_RESULTS_FOLDER}/{name}", here, _MAX_REWARD_BYTES)
            except UngradableWorkError:
                continue
            found = read_rewards(here)
            if self._config.reward_key in found:
                return _HarborRun(completed, found)
            return _HarborRun(
                completed, {}, f"{_RESULTS_FOLDER}/{name} has no finite number `{self._config.reward_key}`."
            )
        return _HarborRun(
            completed, {}, f"test.sh ended with {completed.exit_code} and left no reward in {_RESULTS_FOLDER}."
        )


def read_rewards(file: Path) -> dict[str, float]:
    """The finite numbers of a reward file by name. One alone is the reward, whatever its name."""
    try:
        text = file.read_text()
        content = json.loads(text) if file.suffix == ".json" else {"reward": float(text)}
    except (OSError, ValueError, RecursionError):  # a folder; no text, no JSON, no number
        return {}
    if not isinstance(content, dict):
        content = {"reward": content}
    finite = {name: number for name, value in content.items() if (number := _to_finite(value)) is not None}
    return finite | ({"reward": next(iter(finite.values()))} if len(finite) == len(content) == 1 else {})


def _to_finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


async def _ensure_real_folder(runtime: Runtime, path: str, scratch: Path) -> None:
    """A link that the agent left there would lead elsewhere: a file now, which makes place for a folder."""
    try:
        await runtime.get(path, scratch / "probe", max_bytes=1024)
    except TransferTooLargeError:
        return
    except OSError:
        await runtime.put(b"", path)

"""`harbor`: a Harbor task's tests, run over everything that the agent left.

Harbor's tests look at the whole machine, so they run in the agent's own layer, with every process of its dead. What it
left at /tests and /logs/verifier is gone before they come; `bash /tests/test.sh` runs in the workspace; the reward is
read from outside, when every process is dead: /logs/verifier/reward.json, or else reward.txt, as in Harbor. Of several
named numbers it is `reward`, or the one that `reward_key` names.

Where there is no reward Harbor has an error. Here the tests run once more where no agent has been. If they give none
there either and end well, or can't be started (126, 127), the task's grader is broken (GraderError); otherwise it was
the agent's doing, 0: tests that fail or wait for what nobody made may well end without a reward.

Put back before: programs that tests commonly call (programs.py), /etc/ld.so.preload. pytest finds a configuration in
/tests before any of the agent's, and Python doesn't look for packages in the home. What can't be told from honest work
stays: libraries, packages of the system's interpreters, settings in the home, and whatever the tests themselves read or
run in the workspace (a conftest.py there, when they run pytest there). A task whose answer is one of those programs
names it in `own_programs`. And code of the agent's that the tests run is the same user as they are: it can write the
reward.
"""

import contextlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from pydantic import AliasChoices, Field, field_validator

from polar.evaluators import programs, settings
from polar.evaluators.base import GraderError, Work
from polar.evaluators.carrying import NotTaken, clear, get, refused
from polar.rollout.models import Model
from polar.runtimes.base import Completed, Runtime, SandboxError, Spoiled, TooLarge
from polar.store.base import Verdict

_TESTS = "/tests"
_RESULTS = "/logs/verifier"
_KILLED = 128  # and more: the signal's number
_BROKEN = (0, 126, 127)  # how tests end, without a reward, that no agent could pass: well, or never begun
_LONGEST_REWARD = 64 * 1024
_MOST_LOGS = 64 << 20
_PYTEST_FILES = ("pytest.ini", ".pytest.ini", "pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg")


class HarborConfig(Model):
    tests: str = Field(description="the task's folder tests/, absolute")
    timeout_seconds: float = Field(600, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    env: dict[str, str] = Field({}, description="besides the evaluator's")
    reward_key: str = "reward"
    own_programs: list[str] = Field([], description="programs whose version is the agent's business")

    @field_validator("tests")
    @classmethod
    def _absolute(cls, tests: str) -> str:
        if not Path(tests).is_absolute():
            raise ValueError("it must be an absolute path")
        return tests


class _Ran(Struct, frozen=True):
    completed: Completed
    rewards: dict[str, float]
    why: str | None = None  # there is no reward


class Harbor:
    wants_fresh: ClassVar[bool] = True
    paths: ClassVar[tuple[str, ...]] = ("tests",)  # of its config, on this machine
    wants_layer: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = settings.read(HarborConfig, config)

    async def evaluate(self, work: Work) -> Verdict:
        tests = Path(self._config.tests)
        if not (tests / "test.sh").is_file():
            raise GraderError(f"config.tests: there is no {tests / 'test.sh'}.")
        if work.agent.path(_TESTS) != _TESTS:
            raise GraderError("harbor needs a runtime with a root of its own: bubblewrap, docker or podman, not local.")
        fresh = None if work.live else await work.fresh()
        try:
            first = "" if fresh is None else await self._put_back(work, fresh)
            runtime = work.agent if work.live else await work.again()
            ran = await self._run(work, runtime, first, "harbor")
        except (NotTaken, Spoiled) as error:
            return Verdict(0.0, detail={"why": str(error)})
        detail: dict[str, Any] = {"exit_code": ran.completed.exit_code, "seconds": ran.completed.seconds}
        if work.live:
            detail["live"] = True
        if ran.why is None:
            return Verdict(ran.rewards[self._config.reward_key], detail=detail | {"rewards": ran.rewards})
        if fresh is not None:
            await self._check_itself(work, fresh)
        return Verdict(0.0, detail=detail | {"why": ran.why})

    async def _put_back(self, work: Work, fresh: Runtime) -> str:
        """What graders rely on, as the image has it, before anything runs there again: what the agent put in its place
        must not be started. The folder that comes first in PATH."""
        await programs.put(work.agent, b"", "/etc/ld.so.preload")
        names = [name for name in programs.NAMES if name not in self._config.own_programs]
        return await programs.put_back(work, fresh, names)

    async def _check_itself(self, work: Work, fresh: Runtime) -> None:
        """Raises GraderError where the tests give no reward, whatever the agent does."""
        ran = await self._run(work, fresh, "", "harbor-without-agent")
        if ran.why is not None and ran.completed.exit_code in _BROKEN:
            raise GraderError(f"The tests of {self._config.tests} give no reward without the agent, either: {ran.why}")

    async def _run(self, work: Work, runtime: Runtime, first: str, name: str) -> _Ran:
        scratch = Path(tempfile.mkdtemp(dir=work.scratch))
        await self._place(runtime, scratch)
        env = work.task.evaluator.env if work.task.evaluator is not None else {}
        completed = await runtime.run(
            ["/bin/sh", "-c", 'PATH="$1$PATH"; exec /bin/bash /tests/test.sh', "sh", f"{first}:" if first else ""],
            env={"PYTHONNOUSERSITE": "1"} | env | self._config.env,
            timeout=self._config.timeout_seconds,
            output=work.logs / f"{name}.log",
        )
        if completed.exit_code is None and not completed.timed_out and not completed.out_of_memory:
            raise SandboxError("The grader's runtime was stopped while its tests ran.")
        if not work.live:
            await runtime.stop()
        with contextlib.suppress(NotTaken):  # more than is kept, or nothing
            await get(runtime, _RESULTS, work.logs / f"{name}-verifier", _MOST_LOGS)
        if completed.timed_out:
            return _Ran(completed, {}, "The tests took too long.")
        if completed.out_of_memory:
            return _Ran(completed, {}, "The tests ran out of memory.")
        if completed.exit_code is not None and completed.exit_code > _KILLED:
            # By whom else than by what they ran: a reward that they left is not to be trusted.
            return _Ran(completed, {}, "The tests were killed.")
        return await self._told(runtime, completed, scratch)

    async def _place(self, runtime: Runtime, scratch: Path) -> None:
        """The tests and an empty folder for what they tell, in place of whatever is there."""
        (scratch / "results").mkdir()
        (scratch / "results").chmod(0o777)
        try:
            await _real_folder(runtime, "/logs", scratch)
            for source, inside in ((Path(self._config.tests), _TESTS), (scratch / "results", _RESULTS)):
                await clear(runtime, inside)
                await runtime.put(source, inside)
            if not any((Path(self._config.tests) / name).exists() for name in _PYTEST_FILES):
                await runtime.put(b"[pytest]\n", f"{_TESTS}/pytest.ini")
        except OSError as error:
            raise refused(runtime, _TESTS, error) from error

    async def _told(self, runtime: Runtime, completed: Completed, scratch: Path) -> _Ran:
        for name in ("reward.json", "reward.txt"):
            here = scratch / name
            try:
                await get(runtime, f"{_RESULTS}/{name}", here, _LONGEST_REWARD)
            except NotTaken:
                continue
            found = rewards(here)
            if self._config.reward_key in found:
                return _Ran(completed, found)
            return _Ran(completed, {}, f"{_RESULTS}/{name} has no finite number `{self._config.reward_key}`.")
        return _Ran(completed, {}, f"test.sh ended with {completed.exit_code} and left no reward in {_RESULTS}.")


def rewards(file: Path) -> dict[str, float]:
    """The finite numbers of a reward file by name. One alone is the reward, whatever its name."""
    try:
        text = file.read_text()
        told = json.loads(text) if file.suffix == ".json" else {"reward": float(text)}
    except (OSError, ValueError, RecursionError):  # a folder; no text, no JSON, no number
        return {}
    if not isinstance(told, dict):
        told = {"reward": told}
    finite = {name: number for name, value in told.items() if (number := _finite(value)) is not None}
    return finite | ({"reward": next(iter(finite.values()))} if len(finite) == len(told) == 1 else {})


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


async def _real_folder(runtime: Runtime, inside: str, scratch: Path) -> None:
    """A link that the agent left there would lead elsewhere: a file now, which makes place for a folder."""
    try:
        await runtime.get(inside, scratch / "probe", max_bytes=1024)
    except TooLarge:
        return
    except OSError:
        await runtime.put(b"", inside)

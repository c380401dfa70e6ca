"""A project's tests, run in a runtime by reporter.py, with results that the tests themselves can't easily write.

reporter.py and its results have a folder of their own, of a random name, outside the workspace. The results are read
from outside, when every process inside is dead. They are signed with a secret that the interpreter is told: one that
stands in the workspace could be the agent's own, and is not used.
"""

import asyncio
import json
import posixpath
import secrets
import shlex
from pathlib import Path
from typing import Literal

from msgspec import Struct

from polar.errors import ConfigError
from polar.evaluators import results
from polar.evaluators.base import GraderError, NotTaken
from polar.evaluators.carrying import NotThere, explain_put_error, get
from polar.evaluators.links import below
from polar.evaluators.results import BrokenResults, Run
from polar.runtimes.base import Completed, Runtime, SandboxError
from polar.store.base import Evidence

UPLOADED = ("reporter.py", "canaries.py", "confinement.py", "remote_codec.py", "remote_modules.py", "remote_worker.py")
_CHECK_SECONDS = 120.0
_MOST_RESULTS = 256 << 20
_TAIL = 1000
_NOT_FOUND = 127  # as shells say it

# PYTHONPATH may name folders of the workspace, whose modules must not be there before reporter.py is.
_START = 'POLAR_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec "$@"'

# Where the workspace really is; where a program is found; the links on the way from there, and where they lead.
_WHERE = """
pwd -P
file=$(command -v -- "$1") || exit 127
printf '%s\\n' "$file"
case $file in /*) rest=$file ;; *) rest=$PWD/$file ;; esac
at=
while [ -n "$rest" ]; do
    rest=${rest#/} part=${rest%%/*} rest=${rest#"$part"}
    case $part in
        '' | .) ;;
        ..)
            printf '%s\\n' "$at"
            at=${at%/*}
            ;;
        *)
            if [ -L "$at/$part" ]; then
                printf '%s\\n' "$at/$part"
                to=$(readlink "$at/$part") || exit 1
                case $to in /*) at= ;; esac
                rest=/$to$rest
            else
                at=$at/$part
            fi
            ;;
    esac
done
printf '%s\\n' "$at"
"""


class Plan(Struct, frozen=True):
    framework: Literal["pytest", "unittest"]
    python: str
    args: list[str]

    @property
    def test_args(self) -> list[str]:
        """The arguments that may name tests, or are the program that runs them."""
        if self.framework == "unittest":
            return self.args[2:] if self.args[0] == "-m" else self.args
        return [arg for arg in self.args if ".py" in arg]


def plan(command: str | list[str]) -> Plan | None:
    """`pytest ...` and `PYTHON -m pytest ...` are pytest's; another program that Python runs is taken for unittest's;
    None for anything else."""
    words = shlex.split(command) if isinstance(command, str) else command
    if not words:
        return None
    name = Path(words[0]).name
    if name in ("pytest", "py.test"):
        return Plan("pytest", "python3", words[1:])
    if name.startswith("python") and len(words) > 1:
        if words[1:3] == ["-m", "pytest"]:
            return Plan("pytest", words[0], words[3:])
        if words[1] == "-m" or not words[1].startswith("-"):
            return Plan("unittest", words[0], words[1:])
    return Plan("unittest", "python3", words) if name.endswith(".py") else None


def named_plan(command: str | list[str], field: str) -> Plan:
    found = plan(command)
    if found is None:
        raise ConfigError(f"config.{field}: it must be `pytest ...`, `PYTHON -m pytest ...` or `PYTHON FILE.py ...`.")
    return found


class Isolation(Struct, frozen=True):
    """The code under test runs in a process of its own (remote_modules.py)."""

    equality: bool = False  # whether objects of the code under test are compared by its own operators


class SignedRun:
    """One run. `check` comes before anything of the agent's is in the runtime."""

    def __init__(
        self,
        runtime: Runtime,
        plan: Plan,
        env: dict[str, str],
        scratch: Path,
        *,
        named: list[str] | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        """`named` are the tests that the task names: their files are tests, whatever they are called."""
        self._runtime = runtime
        self._plan = plan
        self._tests = results.test_files([*plan.test_args, *(named or [])])
        self._isolation = isolation
        self._python = plan.python
        self._env = env
        self._scratch = scratch
        self._folder = f"/tmp/polar-{secrets.token_hex(8)}"

    async def check(self, log: Path) -> None:
        """Raises GraderError where the tests could not be run, whatever the agent did."""
        await self._put()
        self._python = await self._find()
        done = await self._start("", log, _CHECK_SECONDS, check=True)
        if done.exit_code != 0:
            raise GraderError(
                f"{self._plan.python} can't run {self._plan.framework} in the runtime, before anything of the agent's "
                f"is there: {_said(log) or done.exit_code}"
            )

    async def run(self, log: Path, timeout: float, *, stop: bool = True) -> Run:
        """Stops the runtime. Raises BrokenResults where the run did not come to an end that can be believed, NotTaken
        where the agent's work leaves no room for it."""
        await self._put()
        secret = secrets.token_hex(32)
        done = await self._start(secret, log, timeout, check=False)
        if stop:
            await self._runtime.stop()
        check_ended(done)
        here = self._scratch / f"results-{secrets.token_hex(4)}"
        try:
            await get(self._runtime, f"{self._folder}/results", here, _MOST_RESULTS)
        except NotThere:
            message = "The tests were not begun, or their results were removed."
            raise BrokenResults(message, Evidence("grader_disrupted", "results", detail=message)) from None
        except NotTaken as error:
            raise BrokenResults(str(error)) from error
        if not here.is_file():
            raise BrokenResults.proven(
                "results_forged", "results", "The tests' results were exchanged for something else."
            )
        return await asyncio.to_thread(results.signed, here, secret)

    async def _find(self) -> str:
        """The interpreter as it is found without the agent's files: a PATH may name folders of the workspace."""
        named, workdir = self._plan.python, self._runtime.path(self._runtime.spec.workdir)
        listing = self._scratch / "python"
        done = await self._runtime.run(["/bin/sh", "-c", _WHERE, "sh", named], env=self._env, output=listing)
        if done.exit_code == _NOT_FOUND:
            raise GraderError(f"There is no {named} in the runtime, before anything of the agent's is there.")
        if done.exit_code != 0:
            raise GraderError(f"Where {named} leads can't be told: {_said(listing) or done.exit_code}")
        real, found, *places = listing.read_text(errors="surrogateescape").splitlines()
        if any(below(place, folder) and place != folder for place in places for folder in (workdir, real)):
            raise GraderError(
                f"{named} is, or leads through, a file of the workspace, which the agent may exchange: put the "
                f"environment that runs the tests outside of {self._runtime.spec.workdir}."
            )
        return posixpath.join(real, found)

    async def _put(self) -> None:
        here = self._scratch / Path(self._folder).name
        _make(here)
        try:
            await self._runtime.put(here, self._folder)
        except OSError as error:
            raise explain_put_error(self._runtime, self._folder, error) from error

    async def _start(self, secret: str, log: Path, timeout: float, *, check: bool) -> Completed:
        inside = self._runtime.path
        job = {
            "framework": self._plan.framework,
            "check": check,
            "secret": secret,
            "results": inside(f"{self._folder}/results"),
            "workdir": inside(self._runtime.spec.workdir),
            "args": self._args(),
            "tests": self._tests,
            "isolate": None if self._isolation is None else {"equality": self._isolation.equality},
        }
        script = inside(f"{self._folder}/reporter.py")
        return await self._runtime.run(
            ["/bin/sh", "-c", _START, "sh", self._python, script],
            env=self._env,
            stdin=json.dumps(job).encode(),
            timeout=timeout,
            output=log,
        )

    def _args(self) -> list[str]:
        if self._plan.framework == "unittest":
            return self._plan.args
        root = self._runtime.path(self._runtime.spec.workdir)
        return ["-p", "no:cacheprovider", f"--rootdir={root}", *self._plan.args]


def check_ended(done: Completed) -> None:
    """Raises BrokenResults where it was ended, by what it did."""
    if done.timed_out:
        raise BrokenResults("The tests took too long.")
    if done.out_of_memory:
        raise BrokenResults("The tests ran out of memory.")
    if done.exit_code is None:
        raise SandboxError("The grader's runtime was stopped while its tests ran.")


def _make(folder: Path) -> None:
    """Whoever runs the tests inside may write into it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    for name in UPLOADED:
        script = folder / name
        script.write_bytes(Path(__file__).with_name(name).read_bytes())
        script.chmod(0o644)


def _said(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:].strip() if log.is_file() else ""

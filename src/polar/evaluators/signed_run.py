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
from polar.evaluators.base import GraderError, UngradableWorkError
from polar.evaluators.results import BrokenResultsError, RunResults
from polar.evaluators.transfer.links import is_below
from polar.evaluators.transfer.workspace import MissingArtifactError, explain_put_error, get
from polar.records.session import Evidence
from polar.runtimes.base import CommandResult, Runtime, SandboxError

UPLOADED_SCRIPTS = (
    "reporter.py",
    "canaries.py",
    "confinement.py",
    "remote_codec.py",
    "remote_modules.py",
    "remote_worker.py",
)
SCRIPTS_FOLDER = Path(__file__).parent / "sandbox"
_CHECK_SECONDS = 120.0
_MAX_RESULTS_BYTES = 256 << 20
_MAX_LOG_TAIL_CHARS = 1000
_EXIT_NOT_FOUND = 127  # as shells say it

# PYTHONPATH may name folders of the workspace, whose modules must not be there before reporter.py is.
_START_SCRIPT = 'POLAR_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec "$@"'

# Where the workspace really is; where a program is found; the links on the way from there, and where they lead.
_LOCATE_SCRIPT = """
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


class RunnerCommand(Struct, frozen=True):
    framework: Literal["pytest", "unittest"]
    python: str
    args: list[str]

    @property
    def test_args(self) -> list[str]:
        """The arguments that may name tests, or are the program that runs them."""
        if self.framework == "unittest":
            return self.args[2:] if self.args[0] == "-m" else self.args
        return [arg for arg in self.args if ".py" in arg]


def parse_command(command: str | list[str]) -> RunnerCommand | None:
    """`pytest ...` and `PYTHON -m pytest ...` are pytest's; another program that Python runs is taken for unittest's;
    None for anything else."""
    words = shlex.split(command) if isinstance(command, str) else command
    if not words:
        return None
    name = Path(words[0]).name
    if name in ("pytest", "py.test"):
        return RunnerCommand("pytest", "python3", words[1:])
    if name.startswith("python") and len(words) > 1:
        if words[1:3] == ["-m", "pytest"]:
            return RunnerCommand("pytest", words[0], words[3:])
        if words[1] == "-m" or not words[1].startswith("-"):
            return RunnerCommand("unittest", words[0], words[1:])
    return RunnerCommand("unittest", "python3", words) if name.endswith(".py") else None


def require_command(command: str | list[str], field: str) -> RunnerCommand:
    found = parse_command(command)
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
        command: RunnerCommand,
        env: dict[str, str],
        scratch: Path,
        *,
        named_tests: list[str] | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        """`named` are the tests that the task names: their files are tests, whatever they are called."""
        self._runtime = runtime
        self._command = command
        self._test_files = results.guess_test_files([*command.test_args, *(named_tests or [])])
        self._isolation = isolation
        self._python = command.python
        self._env = env
        self._scratch = scratch
        self._folder = f"/tmp/polar-{secrets.token_hex(8)}"

    async def check(self, log: Path) -> None:
        """Raises GraderError where the tests could not be run, whatever the agent did."""
        await self._upload_scripts()
        self._python = await self._find_python()
        done = await self._start("", log, _CHECK_SECONDS, check=True)
        if done.exit_code != 0:
            raise GraderError(
                f"{self._command.python} can't run {self._command.framework} in the runtime, before "
                "anything of the agent's "
                f"is there: {_read_log_tail(log) or done.exit_code}"
            )

    async def run(self, log: Path, timeout: float, *, stop: bool = True) -> RunResults:
        """Stops the runtime. Raises BrokenResultsError where the run did not come to an end that can be believed,
        UngradableWorkError where the agent's work leaves no room for it."""
        await self._upload_scripts()
        secret = secrets.token_hex(32)
        done = await self._start(secret, log, timeout, check=False)
        if stop:
            await self._runtime.stop()
        check_completed(done)
        here = self._scratch / f"results-{secrets.token_hex(4)}"
        try:
            await get(self._runtime, f"{self._folder}/results", here, _MAX_RESULTS_BYTES)
        except MissingArtifactError:
            message = "The tests were not begun, or their results were removed."
            raise BrokenResultsError(message, Evidence("grader_disrupted", "results", detail=message)) from None
        except UngradableWorkError as error:
            raise BrokenResultsError(str(error)) from error
        if not here.is_file():
            raise BrokenResultsError.with_proof(
                "results_forged", "results", "The tests' results were exchanged for something else."
            )
        return await asyncio.to_thread(results.parse_signed_results, here, secret)

    async def _find_python(self) -> str:
        """The interpreter as it is found without the agent's files: a PATH may name folders of the workspace."""
        named, workdir = self._command.python, self._runtime.path(self._runtime.spec.workdir)
        listing = self._scratch / "python"
        done = await self._runtime.run(["/bin/sh", "-c", _LOCATE_SCRIPT, "sh", named], env=self._env, output=listing)
        if done.exit_code == _EXIT_NOT_FOUND:
            raise GraderError(f"There is no {named} in the runtime, before anything of the agent's is there.")
        if done.exit_code != 0:
            raise GraderError(f"Where {named} leads can't be told: {_read_log_tail(listing) or done.exit_code}")
        real, found, *places = listing.read_text(errors="surrogateescape").splitlines()
        if any(is_below(place, folder) and place != folder for place in places for folder in (workdir, real)):
            raise GraderError(
                f"{named} is, or leads through, a file of the workspace, which the agent may exchange: put the "
                f"environment that runs the tests outside of {self._runtime.spec.workdir}."
            )
        return posixpath.join(real, found)

    async def _upload_scripts(self) -> None:
        here = self._scratch / Path(self._folder).name
        _write_scripts(here)
        try:
            await self._runtime.put(here, self._folder)
        except OSError as error:
            raise explain_put_error(self._runtime, self._folder, error) from error

    async def _start(self, secret: str, log: Path, timeout: float, *, check: bool) -> CommandResult:
        inside = self._runtime.path
        job = {
            "framework": self._command.framework,
            "check": check,
            "secret": secret,
            "results": inside(f"{self._folder}/results"),
            "workdir": inside(self._runtime.spec.workdir),
            "args": self._build_args(),
            "tests": self._test_files,
            "isolate": None if self._isolation is None else {"equality": self._isolation.equality},
        }
        script = inside(f"{self._folder}/reporter.py")
        return await self._runtime.run(
            ["/bin/sh", "-c", _START_SCRIPT, "sh", self._python, script],
            env=self._env,
            stdin=json.dumps(job).encode(),
            timeout=timeout,
            output=log,
        )

    def _build_args(self) -> list[str]:
        if self._command.framework == "unittest":
            return self._command.args
        root = self._runtime.path(self._runtime.spec.workdir)
        return ["-p", "no:cacheprovider", f"--rootdir={root}", *self._command.args]


def check_completed(done: CommandResult) -> None:
    """Raises BrokenResultsError where it was ended, by what it did."""
    if done.timed_out:
        raise BrokenResultsError("The tests took too long.")
    if done.out_of_memory:
        raise BrokenResultsError("The tests ran out of memory.")
    if done.exit_code is None:
        raise SandboxError("The grader's runtime was stopped while its tests ran.")


def _write_scripts(folder: Path) -> None:
    """Whoever runs the tests inside may write into it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    for name in UPLOADED_SCRIPTS:
        script = folder / name
        script.write_bytes((SCRIPTS_FOLDER / name).read_bytes())
        script.chmod(0o644)


def _read_log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_MAX_LOG_TAIL_CHARS:].strip() if log.is_file() else ""

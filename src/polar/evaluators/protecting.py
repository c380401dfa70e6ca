"""Files that an agent's version of never counts: tests, and what configures how they are run.

They stay as the task prepared them: changes to them are dropped, what was added is not carried, what was deleted is
still there. All else that the agent changed is laid over a runtime that no agent has been in.
"""

import asyncio
import re
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from msgspec import Struct
from pydantic import Field

from polar.changes import Change, changes, entries
from polar.evaluators.base import GraderError, Work
from polar.evaluators.carrying import NotTaken, get, refused, remove
from polar.rollout.models import Model
from polar.runtimes.base import Runtime, TooLarge

_MB = 1 << 20

DEFAULT = (
    # tests
    "**/tests/**",
    "test/**",
    "test_*.py",
    "*_test.py",
    "conftest.py",
    # what pytest and those who start it read
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "setup.cfg",
    "tox.ini",
    "pyproject.toml",
    "noxfile.py",
    ".coveragerc",
    # what Python runs or looks up by itself; entry points are how pytest finds plug-ins
    "*.pth",
    "sitecustomize.py",
    "usercustomize.py",
    "**/*.egg-info/**",
    "**/*.dist-info/**",
)


class Protecting(Model):
    """The part of an evaluator's config that says which files are protected, and what may be taken."""

    protected: list[str] = Field([], description="globs, besides the usual ones; a name without / anywhere")
    allowed: list[str] = Field([], description="globs of files that are not protected after all")
    max_mb: int = Field(1024, gt=0, description="of the workspace")


class Protected:
    def __init__(self, config: Protecting, *, files: list[str] | None = None) -> None:
        """`files` are protected whatever is allowed."""
        self._globs = _any_of([*DEFAULT, *config.protected])
        self._allowed = _any_of(config.allowed)
        self._files = frozenset(files or ())

    def covers(self, path: str) -> bool:
        """A file in a protected folder is protected; and one that would stand where a protected file is."""
        places = [path, *(str(parent) for parent in PurePosixPath(path).parents[:-1])]
        if not self._files.isdisjoint(places):
            return True
        return any(self._globs.fullmatch(place) for place in places) and not self._allowed.fullmatch(path)

    def split(self, changed: list[Change], prepared: list[str]) -> tuple[list[Change], list[Change]]:
        """Which changes count, and which are dropped. `prepared` are the paths before the agent: nothing of its may
        take the place of a folder that holds a protected one."""
        holding = {
            str(parent)
            for path in [*prepared, *self._files]
            if self.covers(path)
            for parent in PurePosixPath(path).parents
        }
        kept: list[Change] = []
        dropped: list[Change] = []
        for change in changed:
            doomed = self.covers(change.path) or change.path in holding
            (dropped if doomed else kept).append(change)
        return kept, dropped


class Taken(Struct, frozen=True):
    """The agent's workspace beside the one that it was given, on this machine."""

    before: Path
    after: Path
    kept: list[Change]
    dropped: list[Change]


async def take(work: Work, fresh: Runtime, protected: Protected, config: Protecting) -> Taken:
    """Raises NotTaken where the agent's workspace can't be taken, which is its own doing."""
    folder = Path(tempfile.mkdtemp(dir=work.scratch))
    before, workdir = work.before, fresh.spec.workdir
    if before is None:
        before = folder / "before"
        try:
            await fresh.get(workdir, before, max_bytes=config.max_mb * _MB, all_links=True)
        except TooLarge as error:
            raise GraderError(f"{workdir} is too large before the agent has begun: raise max_mb ({error})") from error
    after = folder / "after"
    await get(work.agent, workdir, after, config.max_mb * _MB, all_links=True)
    if not after.is_dir():
        raise NotTaken(f"{workdir} is no folder any more.")
    return await asyncio.to_thread(_taken, before, after, protected)


def _taken(before: Path, after: Path, protected: Protected) -> Taken:
    prepared = [path for path, _ in entries(before)]
    return Taken(before, after, *protected.split(changes(before, after), prepared))


async def lay(taken: Taken, fresh: Runtime) -> None:
    """The changes that count, over a workspace as it was prepared."""
    await _set(fresh, taken.after, taken.kept)


async def put_back(taken: Taken, runtime: Runtime) -> None:
    """The protected files as they were before, in the agent's own runtime."""
    await _set(runtime, taken.before, [Change(change.path, change.after, change.before) for change in taken.dropped])


async def _set(runtime: Runtime, source: Path, changed: list[Change]) -> None:
    """What is gone is removed first: something else may have its name. Nothing is put where a link leads: folders
    on the way are real, or made so."""
    await remove(runtime, [change.path for change in changed if change.after is None])
    present = [change.path for change in changed if change.after is not None]
    if present:
        with tempfile.TemporaryDirectory(dir=source.parent) as folder:
            await asyncio.to_thread(_gather, source, Path(folder), present)
            try:
                await runtime.put(Path(folder), runtime.spec.workdir)
            except OSError as error:
                raise refused(runtime, runtime.spec.workdir, error) from error


def _gather(source: Path, folder: Path, paths: list[str]) -> None:
    folder.chmod(0o755)
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target, follow_symlinks=False)


def _any_of(globs: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(_expression, globs)) or r"(?!)", re.DOTALL)


def _expression(glob: str) -> str:
    """`**/` is any folders or none, `/**` a folder and all in it, `*` and `?` stay within a name. A glob without a
    slash is a name anywhere."""
    if "/" not in glob:
        glob = "**/" + glob
    pieces = re.split(r"(\*\*/|/\*\*$|\*|\?)", glob)
    meant = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(meant.get(piece) or re.escape(piece) for piece in pieces)

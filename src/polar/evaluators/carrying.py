"""An agent's work, carried into a runtime that no agent has been in.

    take (from the agent's runtime, to this machine) -> lay (into the fresh one) -> put_over (the grader's own files)

`carry` does all three.

Everything happens from outside, through `get` and `put`: nothing that an agent left is resolved by a shell, or followed
where it is a link. What an artifact names is *replaced* in the fresh runtime: what the agent deleted is gone there.

The grader's files stand in folders that are real: a link of the agent's on the way to one of them is removed first. An
uploaded folder takes the place of what had its name, so that nothing of the agent's (a conftest.py, say) stands in it;
only one that holds the workspace or an artifact, or is one, is merged with what is there.

What can't be taken because of what the agent did is `NotTaken`: a reward of 0. What the platform failed to do is
SandboxError, what the task's author got wrong GraderError.
"""

import asyncio
import errno
import os
import posixpath
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from pydantic import AfterValidator, Field

from polar.errors import PolarError
from polar.evaluators.base import GraderError, Work
from polar.rollout.models import Model, UploadDir, UploadFile
from polar.runtimes.base import Runtime, SandboxError, TooLarge

_MB = 1 << 20
_PATHS_AT_ONCE = 200  # removed by one `rm`
_GLOB = frozenset("*?[")

# What an agent can bring about by what it leaves, of all that `get` may fail with.
_AGENTS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}


def _inside(path: str) -> str:
    if not path or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no path below the workspace, nor an absolute one without `..`")
    return posixpath.normpath(path)


InsidePath = Annotated[str, AfterValidator(_inside)]
"""A path inside: of the workspace where it is relative."""


GradersFile = Annotated[UploadFile | UploadDir, Field(discriminator="type")]


class Carrying(Model):
    """The part of an evaluator's config that says what is carried."""

    artifacts: list[InsidePath] = Field(["."], description="paths or globs; relative ones are the workspace's")
    files: list[GradersFile] = Field([], description="the grader's own, put over the agent's")
    max_mb: int = Field(1024, gt=0, description="of each artifact")


class NotTaken(PolarError):
    """What the agent left can't be graded, and that is its own doing: a reward of 0, with this sentence."""


class NotThere(NotTaken):
    """There is no file or folder of that name (a link is none)."""


class MoreThanMayBe(NotTaken):
    """It is larger than what may be taken."""


class Piece(Struct, frozen=True):
    """Something of the agent's: where it stood, and its copy on this machine."""

    inside: str
    here: Path


class Glob(Struct, frozen=True):
    """The last parts of a path, below a folder that has no wildcard in its name."""

    folder: str
    pattern: str

    def matches(self, here: Path) -> list[str]:
        """What is named in a copy of the folder, absolute inside; nothing that is below another match."""
        if not here.is_dir():
            return []
        literal = here / self.pattern  # a name may have a bracket in it
        found = [literal] if literal.exists() else sorted(here.glob(self.pattern))
        paths: list[str] = []
        for path in found:
            inside = _join(self.folder, path.relative_to(here).as_posix())
            if not any(below(inside, other) for other in paths):
                paths.append(inside)
        return paths


class Taken(Struct, frozen=True):
    """The agent's work, in the scratch folder."""

    pieces: list[Piece]
    globs: list[Glob]
    scratch: Path

    async def lay(self, fresh: Runtime) -> None:
        """Before anything else of the agent's is there."""
        await self._remove_what_globs_name(fresh)
        for piece in self.pieces:
            try:
                if piece.here.is_dir():
                    await clear(fresh, piece.inside)
                await fresh.put(piece.here, piece.inside)
            except OSError as error:
                raise refused(fresh, piece.inside, error) from error

    async def _remove_what_globs_name(self, fresh: Runtime) -> None:
        doomed: list[str] = []
        for number, glob in enumerate(self.globs):
            here = self.scratch / f"prepared-{number}"
            try:
                await fresh.get(glob.folder, here, max_bytes=1 << 40)
            except FileNotFoundError:
                continue
            doomed += await asyncio.to_thread(glob.matches, here)
        await remove(fresh, [fresh.path(path) for path in doomed])


async def carry(work: Work, config: Carrying) -> Runtime:
    """A runtime with the agent's work and, over it, the grader's files. Raises NotTaken.

    Where the task asked for the agent's own runtime, its work is there already."""
    if work.live:
        runtime = await work.fresh()
    else:
        taken = await take(work, config)
        runtime = await work.fresh()
        await taken.lay(runtime)
    await put_over(work, runtime, config)
    return runtime


async def take(work: Work, config: Carrying) -> Taken:
    """Copies of what `artifacts` names. A path that isn't there is NotTaken; a glob may well match nothing."""
    scratch = _folder(work)
    taken = Taken([], [], scratch)
    for number, artifact in enumerate(config.artifacts):
        here = scratch / str(number)
        inside = absolute(work.agent, artifact)
        if inside == "/":
            raise GraderError("The whole root can't be carried: name `artifacts`, or another `workdir`.")
        if _GLOB.isdisjoint(artifact):
            # With links that lead elsewhere, such as that of a virtual environment to its Python: they go into the
            # fresh runtime as they are, and are not followed here.
            await _take(work, inside, here, config.max_mb, all_links=True)
            taken.pieces.append(Piece(inside, here))
            continue
        glob = _glob(inside)
        taken.globs.append(glob)
        try:
            await _take(work, glob.folder, here, config.max_mb)
        except NotThere:
            continue
        for path in await asyncio.to_thread(glob.matches, here):
            taken.pieces.append(Piece(path, here / posixpath.relpath(path, glob.folder)))
    return taken


async def _take(work: Work, inside: str, here: Path, max_mb: int, *, all_links: bool = False) -> None:
    try:
        await get(work.agent, inside, here, max_mb * _MB, all_links=all_links)
    except MoreThanMayBe:
        if work.live:
            raise
        try:
            await get(await work.fresh(), inside, here, max_mb * _MB)
        except MoreThanMayBe as error:
            raise GraderError(f"{inside} is too large before any agent was there: raise `max_mb`.") from error
        except NotTaken:
            pass
        raise


async def get(runtime: Runtime, inside: str, here: Path, max_bytes: int, *, all_links: bool = False) -> None:
    """`Runtime.get`, with what the agent brought about told from what it didn't."""
    try:
        await runtime.get(inside, here, max_bytes=max_bytes, all_links=all_links)
    except TooLarge as error:
        raise MoreThanMayBe(str(error)) from error
    except OSError as error:
        if error.errno not in _AGENTS:
            raise SandboxError(f"{inside} can't be taken: {error}.") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotThere(f"{inside} is not there.") from error
        raise NotTaken(f"{inside} can't be taken: {error.strerror}.") from error


async def put_over(work: Work, runtime: Runtime, config: Carrying) -> None:
    """The grader's files. After the agent's work."""
    roots = _roots(runtime, config)
    for file in config.files:
        target, source = absolute(runtime, file.target), _source(file)
        try:
            await _make_way(work, runtime, target, roots)
            if isinstance(file, UploadDir) and not any(below(root, target) for root in roots):
                await clear(runtime, target)
            await runtime.put(source, target)
        except OSError as error:
            raise refused(runtime, target, error) from error


async def blank(work: Work, runtime: Runtime, path: str, config: Carrying) -> str:
    """Whatever the agent left where the grader is to write is gone: an empty file is there. Returns where it is."""
    target = absolute(runtime, path)
    try:
        await _make_way(work, runtime, target, _roots(runtime, config))
        await clear(runtime, target)
    except OSError as error:
        raise refused(runtime, target, error) from error
    return target


def _roots(runtime: Runtime, config: Carrying) -> set[str]:
    """The folders that hold the agent's work."""
    artifacts = (absolute(runtime, path) for path in config.artifacts)
    globs = {path if _GLOB.isdisjoint(path) else _glob(path).folder for path in artifacts}
    return {runtime.spec.workdir, *globs}


def _source(file: UploadFile | UploadDir) -> Path | bytes:
    if file.source is None:
        return (file.content or "").encode()
    source = Path(file.source)
    if not (source.is_dir() if isinstance(file, UploadDir) else source.is_file()):
        raise GraderError(f"config.files: {source}, for {file.target}, is not there.")
    return source


async def _make_way(work: Work, runtime: Runtime, target: str, roots: set[str]) -> None:
    """Real folders in place of links of the agent's on the way to `target`, below the `roots`."""
    empty = _folder(work)
    empty.chmod(0o755)
    parent = posixpath.dirname(target)
    for end in (end for end, letter in enumerate(parent + "/") if letter == "/"):
        if any(below(parent[:end], root) and parent[:end] != root for root in roots):
            await runtime.put(empty, parent[:end])  # merged with a folder, in place of anything else


async def clear(runtime: Runtime, inside: str) -> None:
    """Removes a folder from outside: a file takes its place, and makes place for what is put there next."""
    try:
        await runtime.put(b"", inside)
    except OSError as error:
        if error.errno != errno.EBUSY:  # else something is mounted there; it is empty now
            raise


async def remove(runtime: Runtime, paths: list[str]) -> None:
    """Removes files and folders, named as a command must, by a script of nothing but `rm`: images may have no `xargs`,
    and a name that is no text can't be an argument."""
    starts = range(0, len(paths), _PATHS_AT_ONCE)
    lines = [f"rm -rf -- {shlex.join(paths[start : start + _PATHS_AT_ONCE])} || exit\n" for start in starts]
    if lines:
        done = await runtime.run(["/bin/sh", "-s"], stdin=os.fsencode("".join(lines)))
        if done.exit_code != 0:
            raise SandboxError(f"Files can't be removed from the runtime: rm ended with {done.exit_code}.")


def absolute(runtime: Runtime, path: str) -> str:
    """Relative paths are the workspace's."""
    return _join(runtime.spec.workdir, path)


def below(path: str, folder: str) -> bool:
    """Whether an absolute path is the folder itself, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _join(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _glob(inside: str) -> Glob:
    parts = inside.split("/")
    first = next(index for index, part in enumerate(parts) if not _GLOB.isdisjoint(part))
    return Glob("/".join(parts[:first]) or "/", "/".join(parts[first:]))


def _folder(work: Work) -> Path:
    return Path(tempfile.mkdtemp(prefix="carried-", dir=work.scratch))


def refused(runtime: Runtime, inside: str, error: OSError) -> PolarError:
    """What `put` could not do, with what the agent brought about told from what it didn't."""
    if error.errno in _FULL and runtime.spec.limits.disk_mb is not None:
        return NotTaken(f"What the agent left fills the disk: there is no room for {inside}.")
    return SandboxError(f"{inside} can't be put into the runtime: {error}.")

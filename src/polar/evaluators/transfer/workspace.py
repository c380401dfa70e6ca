"""An agent's work, carried into a runtime that no agent has been in.

    take (from the agent's runtime, to this machine) -> lay (into the fresh one) -> upload_grader_files (the grader's
    own files)

`carry` does all three.

Everything happens from outside, through `get` and `put`: nothing that an agent left is resolved by a shell, or followed
where it is a link. What an artifact names is *replaced* in the fresh runtime: what the agent deleted is gone there.

Not everything that was taken is laid (`_Selection`):

- Links only where links.py allows it.
- Nothing where the grader's files will stand. A folder that holds a file of the grader's is the grader's own, unless
  it was there before the agent, or holds the workspace or an artifact.
- No compiled Python, which would be run in place of the source beside it, unless an artifact or the instruction names
  it.
- In a folder that the grader's Python imports from (one that its files share with the agent's, or that PYTHONPATH
  names), no added module with the name of one of Python's own, of an installed one, or of one of the grader's, but for
  those that an artifact or the instruction names.
- In a folder that PATH names, no program with the name of one that is found elsewhere, and no link on the way there.

An uploaded folder takes the place of what had its name; only one that holds the workspace or an artifact, or is one, is
merged with what is there. In the agent's own runtime (`refresh_runtime = false`) the same is removed.

What can't be taken because of what the agent did is `UngradableWorkError`: a reward of 0. What the platform failed to
do is SandboxError, what the task's author got wrong GraderError.
"""

import asyncio
import errno
import os
import posixpath
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace
from pydantic import AfterValidator, Field

from polar.errors import PolarError
from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError
from polar.evaluators.transfer import links
from polar.evaluators.transfer.links import TransferredEntries, escape_path, is_below
from polar.records.session import Evidence
from polar.records.task import RequestModel, UploadDir, UploadFile
from polar.runtimes.base import Runtime, SandboxError, TransferTooLargeError

_MB = 1 << 20
_GLOB_CHARS = frozenset("*?[")

BYTECODE_FOLDER = "__pycache__"
BYTECODE_SUFFIXES = (".pyc", ".pyo")
MODULE_SUFFIXES = (".py", *BYTECODE_SUFFIXES, ".so")
"""How the names of files end that Python imports."""

_AUTO_IMPORTED_MODULES = ("sitecustomize", "usercustomize")  # modules that Python imports by itself

# Which of the modules that are named on the command line are installed outside of the folder that comes first.
_PRINT_INSTALLED = """
import importlib.util, os, sys
own = os.path.realpath(sys.argv[1]) + "/"
for name in sys.argv[2:]:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # what can not even be looked up is not installed
        continue
    if spec is not None and not os.path.realpath(spec.origin or "").startswith(own):
        print(name)
"""

# The two variables that say where programs and modules are searched for.
_PRINT_SEARCH_PATHS = 'printf "%s\\n" "$PATH" "$PYTHONPATH"'

# Which of the programs that are named on the command line are found in the folders that come first.
_PRINT_FOUND = 'PATH=$1; shift; for name; do command -v -- "$name" > /dev/null && printf "%s\\n" "$name"; done; true'

_CWD_IMPORT_PATTERN = re.compile(r"\bpython[\d.]*\s+(?:-(?!I|P)\w+\s+)*-[mc]\b")
_MAX_EVIDENCE = 100
_MAX_MODULES = 5000
_LISTING_SECONDS = 60.0
_UNCHECKED_HASH = 1  # flags of a .pyc that is used without a look at its source

# What an agent can bring about by what it leaves, of all that `get` may fail with.
_AGENT_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EINVAL}
_AGENT_ERRNOS |= {errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EOVERFLOW, errno.EILSEQ}
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


def _validate_path(path: str) -> str:
    if not path or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no path below the workspace, nor an absolute one without `..`")
    return posixpath.normpath(path)


RuntimePath = Annotated[str, AfterValidator(_validate_path)]
"""A path inside: of the workspace where it is relative."""


GraderFile = Annotated[UploadFile | UploadDir, Field(discriminator="type")]


class TransferConfig(RequestModel):
    """The part of an evaluator's config that says what is carried."""

    artifacts: list[RuntimePath] = Field(["."], description="paths or globs; relative ones are the workspace's")
    files: list[GraderFile] = Field([], description="the grader's own, put over the agent's")
    max_mb: int = Field(1024, gt=0, description="of each artifact")

    def list_output_paths(self) -> list[str]:
        """Paths that the grader writes to besides its files."""
        return []

    def list_import_folders(self) -> list[str]:
        """Folders that the grader's own Python imports from besides those of its files."""
        return []


class MissingArtifactError(UngradableWorkError):
    """There is no file or folder of that name (a link is none)."""


class ArtifactTooLargeError(UngradableWorkError):
    """It is larger than what may be taken."""


class ArtifactCopy(Struct, frozen=True):
    """Something of the agent's: where it stood, and its copy on this machine."""

    runtime_path: str
    local_path: Path


class Glob(Struct, frozen=True):
    """The last parts of a path, below a folder that has no wildcard in its name."""

    folder: str
    pattern: str

    def list_matches(self, local_path: Path) -> list[str]:
        """What is named in a copy of the folder, absolute inside; nothing that is below another match."""
        if not local_path.is_dir():
            return []
        literal = local_path / self.pattern  # a name may have a bracket in it
        found = [literal] if literal.exists() else sorted(local_path.glob(self.pattern))
        paths: list[str] = []
        for path in found:
            inside = _join(self.folder, path.relative_to(local_path).as_posix())
            if not any(is_below(inside, other) for other in paths):
                paths.append(inside)
        return paths


class CollectedArtifacts(Struct, frozen=True):
    """The agent's work, in the scratch folder."""

    copies: list[ArtifactCopy]
    globs: list[Glob]
    scratch: Path

    async def put_into(self, fresh: Runtime) -> None:
        """Before anything else of the agent's is there."""
        await self._remove_glob_matches(fresh)
        for piece in self.copies:
            try:
                if piece.local_path.is_dir():
                    await remove_folder(fresh, piece.runtime_path)
                await fresh.put(piece.local_path, piece.runtime_path)
            except OSError as error:
                raise explain_put_error(fresh, piece.runtime_path, error) from error

    async def _remove_glob_matches(self, fresh: Runtime) -> None:
        doomed: list[str] = []
        for number, glob in enumerate(self.globs):
            here = self.scratch / f"prepared-{number}"
            try:
                await fresh.get(glob.folder, here, max_bytes=1 << 40)
            except FileNotFoundError:
                continue
            doomed += await asyncio.to_thread(glob.list_matches, here)
        await fresh.delete(doomed)


class PreparedGrading(Struct, frozen=True):
    """A runtime with the agent's work and the grader's files, and what was seen on the way."""

    runtime: Runtime
    evidence: list[Evidence]


async def prepare_grading(
    work: GradingContext, config: TransferConfig, env: dict[str, str] | None = None
) -> PreparedGrading:
    """The agent's work in a runtime with the grader's files over it. `env` are the grader's variables besides those of
    the runtime. Raises UngradableWorkError.

    Where the task asked for the agent's own runtime, its work is there already."""
    if not work.live:
        taken = await collect_artifacts(work, config)
        runtime = await work.create_fresh_runtime()
        selection = await _TransferFilter.create(work, runtime, config, taken, env)
        await asyncio.to_thread(selection.prune)
        await replace(
            taken, copies=[piece for piece in taken.copies if piece.runtime_path not in selection.dropped_paths]
        ).put_into(runtime)
        await upload_grader_files(work, runtime, config)
        return PreparedGrading(runtime, limit_evidence(selection.evidence))
    runtime = await work.create_fresh_runtime()
    evidence = await _clean_up(work, runtime, config, env)
    await upload_grader_files(work, runtime, config)
    return PreparedGrading(runtime, evidence)


async def _clean_up(
    work: GradingContext, runtime: Runtime, config: TransferConfig, env: dict[str, str] | None
) -> list[Evidence]:
    """Removes from the agent's own runtime what would not be laid into a fresh one. A workspace that was too large to
    be copied before the agent began is left as it is."""
    workdir = runtime.spec.workdir
    shared = find_grader_paths(work, runtime, config).shared
    tops = {folder for folder in shared if not is_below(folder, workdir) and not is_below(workdir, folder)}
    if work.initial_workspace is not None:
        tops.add(workdir)
    scratch = _make_scratch_folder(work)
    taken = CollectedArtifacts([], [], scratch)
    for number, top in enumerate(sorted(tops)):
        try:
            await get(runtime, top, scratch / str(number), config.max_mb * _MB, all_links=True)
        except MissingArtifactError:
            continue
        taken.copies.append(ArtifactCopy(top, scratch / str(number)))
    selection = await _TransferFilter.create(work, runtime, config, taken, env)
    await delete(runtime, selection.dropped_roots)
    return limit_evidence(selection.evidence)


class GraderPaths(Struct, frozen=True):
    """Where the grader's files will stand, by absolute path."""

    files: list[str]  # each file or folder that is uploaded, or written to
    folders: list[str]  # those that are the grader's own, with all that is in them
    shared: list[str]  # folders of the agent's that the grader's Python imports from

    @property
    def folders_and_files(self) -> list[str]:
        return [*self.folders, *self.files]


def find_grader_paths(work: GradingContext, runtime: Runtime, config: TransferConfig) -> GraderPaths:
    """A folder that holds a file of the grader's is its own, unless it was there before the agent or holds its work."""
    roots, workdir = _list_artifact_roots(runtime, config), runtime.spec.workdir
    outputs, shared_folders = (
        [to_absolute(runtime, path) for path in paths]
        for paths in (config.list_output_paths(), config.list_import_folders())
    )
    places = GraderPaths(outputs, [], shared_folders)
    for file in config.files:
        target = to_absolute(runtime, file.target)
        if isinstance(file, UploadDir) and not any(is_below(root, target) for root in roots):
            places.folders.append(target)
            continue
        uploaded = (
            [_join(target, path) for path in _list_upload_files(file)] if isinstance(file, UploadDir) else [target]
        )
        for path in uploaded:
            folder = posixpath.dirname(path)
            shared = any(is_below(root, folder) for root in roots) or _existed_before(work, workdir, folder)
            places.files.append(path)
            (places.shared if shared else places.folders).append(folder)
    return places


class SearchFolders(Struct, frozen=True):
    """Folders of the workspace that the grader's PATH and PYTHONPATH name, by absolute path."""

    programs: list[str]
    modules: list[str]
    other_programs: str  # the rest of PATH

    @property
    def folders_and_parents(self) -> set[str]:
        return {above for folder in (*self.programs, *self.modules) for above in (folder, *_list_parents(folder))}


async def find_search_folders(runtime: Runtime, env: dict[str, str] | None, scratch: Path) -> SearchFolders:
    """As a program finds them that is started with `env` in the workspace."""
    lines = await _print_lines(runtime, [_PRINT_SEARCH_PATHS], scratch, env)
    path, python_path = (line.split(":") for line in (*lines, "", "")[:2])
    workdir, real = runtime.spec.workdir, runtime.path(runtime.spec.workdir)

    def find_inside(folders: list[str]) -> dict[str, str]:
        found = {folder: posixpath.normpath(posixpath.join(real, folder)) for folder in folders}
        return {
            folder: _join(workdir, posixpath.relpath(place, real))
            for folder, place in found.items()
            if is_below(place, real)
        }

    programs = find_inside(path if lines else [])
    modules = find_inside([folder for folder in python_path if folder])
    others = ":".join(folder for folder in path if folder not in programs)
    return SearchFolders(list(programs.values()), list(modules.values()), others)


async def find_programs(runtime: Runtime, names: set[str], folders: str, scratch: Path) -> set[str]:
    """Those of the programs that are found in the folders, which are written as in PATH."""
    usual = sorted(name for name in names if re.fullmatch(r"[\w.+\[-]+", name))[:_MAX_MODULES]
    return set(await _print_lines(runtime, [_PRINT_FOUND, "sh", folders, *usual], scratch)) if usual else set()


async def _print_lines(
    runtime: Runtime, script: list[str], scratch: Path, env: dict[str, str] | None = None
) -> list[str]:
    """What a shell prints; nothing where the runtime has none."""
    with tempfile.NamedTemporaryFile(prefix="lines-", dir=scratch) as listing:
        await runtime.run(
            ["/bin/sh", "-c", *script], env=env, cwd="/", timeout=_LISTING_SECONDS, output=Path(listing.name)
        )
        return listing.read().decode(errors="surrogateescape").splitlines()


def find_file_names(instruction: str) -> frozenset[str]:
    """Words of an instruction that are names of files."""
    return frozenset(re.findall(r"(?<![\w.-])[\w-]+(?:\.[\w-]+)+", instruction))


async def find_installed_modules(runtime: Runtime, names: set[str], scratch: Path) -> set[str]:
    """Those of the modules that Python has in a runtime before anything of the agent's is there: its own, and what is
    installed besides, but for what is installed from the workspace."""
    own = {name for name in names if name in sys.stdlib_module_names}
    others = sorted(name for name in names - own if name.isidentifier())
    if not others:
        return own
    with tempfile.NamedTemporaryFile(prefix="modules-", dir=scratch) as listing:
        workdir = runtime.path(runtime.spec.workdir)
        argv = ["python3", "-c", _PRINT_INSTALLED, workdir, *others[:_MAX_MODULES]]
        await runtime.run(argv, cwd="/", timeout=_LISTING_SECONDS, output=Path(listing.name))
        found = listing.read().decode(errors="replace").splitlines()
    return own | (set(found) & names)


def imports_from_cwd(command: str) -> bool:
    """Whether a command starts Python so that it imports from the folder that it is started in."""
    return _CWD_IMPORT_PATTERN.search(command) is not None


def _existed_before(work: GradingContext, workdir: str, folder: str) -> bool:
    """Whether a folder was there before the agent. Of those outside of the workspace, its own runtime may have any."""
    if not is_below(folder, workdir):
        return work.live
    return work.initial_workspace is None or (work.initial_workspace / posixpath.relpath(folder, workdir)).is_dir()


def _list_upload_files(upload: UploadDir) -> list[str]:
    top = Path(upload.source or "")
    return [path.relative_to(top).as_posix() for path in top.rglob("*") if not path.is_dir()]


class _CopiedEntry(Struct, frozen=True):
    local_path: Path
    is_folder: bool
    target: str | None  # of a link


class _TransferFilter:
    """Which of the carried files are not laid, and what that says."""

    def __init__(self, entries: dict[str, _CopiedEntry], workdir: str, before: dict[str, Path]) -> None:
        """`before` is what was in the workspace before the agent; nothing where that is not known."""
        self._entries = entries
        self._workdir = workdir
        self._before = before
        self._is_before_known = bool(before)
        self.dropped_paths: set[str] = set()
        self.dropped_roots: list[str] = []
        self.evidence: list[Evidence] = []

    @classmethod
    async def create(
        cls,
        work: GradingContext,
        runtime: Runtime,
        config: TransferConfig,
        taken: CollectedArtifacts,
        env: dict[str, str] | None,
    ) -> "_TransferFilter":
        entries = await asyncio.to_thread(_index_entries, taken.copies)
        workdir = runtime.spec.workdir
        before = (
            {}
            if work.initial_workspace is None
            else await asyncio.to_thread(_list_files, workdir, work.initial_workspace)
        )
        selection = cls(entries, workdir, before)
        places = find_grader_paths(work, runtime, config)
        named = {to_absolute(runtime, path) for path in config.artifacts}
        told = find_file_names(work.task.instruction)
        named |= {path for path, entry in entries.items() if not entry.is_folder and posixpath.basename(path) in told}
        search = await find_search_folders(runtime, env, work.scratch)
        places = replace(places, shared=[*places.shared, *search.modules])
        installed = await find_installed_modules(runtime, selection._find_added_modules(places.shared), work.scratch)
        names = await asyncio.to_thread(selection._find_changed_programs, search.programs)
        programs = await find_programs(runtime, set(names.values()), search.other_programs, work.scratch)
        doomed = {path for path, name in names.items() if name in programs}
        doomed |= {path for path in search.folders_and_parents & entries.keys() if selection._is_agent_link(path)}
        await asyncio.to_thread(selection._drop_files, places, named, installed, doomed)
        await selection._drop_links(work, runtime, places, taken)
        return selection

    def prune(self) -> None:
        """Removes from the copies on this machine what is not laid."""
        for path in self.dropped_roots:
            here = self._entries[path].local_path
            if self._entries[path].is_folder:
                shutil.rmtree(here, ignore_errors=True)
            else:
                here.unlink(missing_ok=True)

    def _find_added_modules(self, shared: list[str]) -> set[str]:
        """The names of modules that the agent added to folders that the grader's Python imports from."""
        return {
            posixpath.basename(path).split(".")[0]
            for path, entry in self._entries.items()
            if path not in self._before and self._is_module(path, entry.is_folder, shared)
        }

    def _find_changed_programs(self, folders: list[str]) -> dict[str, str]:
        """What the agent added to or changed in the folders: names by path."""
        return {
            path: posixpath.basename(path)
            for path, entry in self._entries.items()
            if posixpath.dirname(path) in folders and not entry.is_folder and self._is_changed(path, entry)
        }

    def _is_changed(self, path: str, entry: _CopiedEntry) -> bool:
        if entry.target is not None:
            return not self._is_link_of_task(path, entry.target)
        before = self._before.get(path)
        return before is None or not _has_same_bytes(before, entry.local_path)

    def _is_agent_link(self, path: str) -> bool:
        target = self._entries[path].target
        return target is not None and not self._is_link_of_task(path, target)

    def _drop_files(self, places: GraderPaths, requested: set[str], installed: set[str], suspects: set[str]) -> None:
        """`doomed` are paths that are not laid unless they are named."""
        on_the_way = {above for place in places.folders_and_files for above in _list_parents(place)}
        for path, entry in self._entries.items():
            added = path not in self._before
            if any(is_below(path, place) for place in places.folders_and_files):
                if added and not entry.is_folder:
                    planted = self._is_before_known and entry.target is None and self._is_hidden(path)
                    self.evidence.append(Evidence("grader_path", escape_path(path), proven=planted))
                self._drop(path)
            elif path in on_the_way and not entry.is_folder:
                self._drop(path)
            elif path not in requested and self._is_compiled(path, entry):
                if added and is_unchecked_bytecode(entry.local_path) and "site-packages" not in path:
                    detail = "A compiled file that is used whatever its source says."
                    self.evidence.append(Evidence("grader_environment", escape_path(path), proven=True, detail=detail))
                self._drop(path)
            elif path in suspects and path not in requested:
                detail = "A program that would be started in the place of another one."
                self.evidence.append(Evidence("grader_environment", escape_path(path), detail=detail))
                self._drop(path)
            elif added and path not in requested and self._shadows_module(path, entry, places, installed):
                detail = "A module that Python would import in the place of another one."
                self.evidence.append(Evidence("grader_environment", escape_path(path), detail=detail))
                self._drop(path)

    def _is_compiled(self, path: str, entry: _CopiedEntry) -> bool:
        if BYTECODE_FOLDER in path.split("/"):
            return True
        if not path.endswith(BYTECODE_SUFFIXES) or entry.is_folder:
            return False
        before = self._before.get(path)
        return before is None or entry.target is not None or not _has_same_bytes(before, entry.local_path)

    async def _drop_links(
        self, work: GradingContext, runtime: Runtime, places: GraderPaths, taken: CollectedArtifacts
    ) -> None:
        left = {
            path: entry
            for path, entry in self._entries.items()
            if self.dropped_paths.isdisjoint((path, *_list_parents(path)))
        }
        found = {path: entry.target for path, entry in left.items() if entry.target is not None}
        made = [path for path, target in found.items() if not self._is_link_of_task(path, target)]
        carried = TransferredEntries(
            {path: entry.target for path, entry in left.items()},
            frozenset(piece.runtime_path for piece in taken.copies),
        )
        refused = await links.find_refused_links(
            carried, made, places.folders_and_files, agent=work.agent_runtime, fresh=runtime, scratch=work.scratch
        )
        for link in refused:
            proven = self._is_before_known and link.enters_grader_paths and link.resolved_path not in self._before
            self.evidence.append(link.evidence(proven=proven))
            self._drop(link.path)

    def _is_hidden(self, path: str) -> bool:
        """Of the workspace, in a place that no task has to do with."""
        return any(part.startswith(".") for part in path.removeprefix(self._workdir).split("/"))

    def _shadows_module(self, path: str, entry: _CopiedEntry, places: GraderPaths, installed: set[str]) -> bool:
        """Whether Python imports it by itself, or in a shared folder before an installed or a grader's module."""
        stem = posixpath.basename(path).split(".")[0]
        if self._is_module(path, entry.is_folder, places.shared):
            return (
                stem in (*installed, *_AUTO_IMPORTED_MODULES)
                or _join(posixpath.dirname(path), f"{stem}.py") in places.files
            )
        return (
            stem in _AUTO_IMPORTED_MODULES
            and "site-packages" not in path
            and self._is_module(path, entry.is_folder, None)
        )

    def _is_module(self, path: str, is_folder: bool, folders: list[str] | None) -> bool:
        """Whether it can be imported, by its name from one of the folders."""
        if folders is not None and posixpath.dirname(path) not in {folder.rstrip("/") or "/" for folder in folders}:
            return False
        if is_folder:
            return any(f"{path}/__init__{suffix}" in self._entries for suffix in MODULE_SUFFIXES)
        return path.endswith(MODULE_SUFFIXES)

    def _is_link_of_task(self, path: str, target: str) -> bool:
        before = self._before.get(path)
        return before is not None and before.is_symlink() and os.readlink(before) == target

    def _drop(self, path: str) -> None:
        if self.dropped_paths.isdisjoint(_list_parents(path)):
            self.dropped_roots.append(path)
            self.dropped_paths.add(path)


def _index_entries(pieces: list[ArtifactCopy]) -> dict[str, _CopiedEntry]:
    """Everything that was taken, by absolute path; a folder before what is in it."""
    return {
        _join(piece.runtime_path, path) if path else piece.runtime_path: _CopiedEntry(here, is_folder, target)
        for piece in pieces
        for path, here, is_folder, target in walk(piece.local_path)
    }


def _list_files(runtime_path: str, top: Path) -> dict[str, Path]:
    return {_join(runtime_path, path) if path else runtime_path: here for path, here, _, _ in walk(top)}


def walk(top: Path) -> Iterator[tuple[str, Path, bool, str | None]]:
    """What stands at and below a copy: path below it, file, whether it is a folder, where it leads if it is a link."""
    if not os.path.lexists(top):
        return
    ahead = [("", top)]
    while ahead:
        path, here = ahead.pop()
        mode = here.lstat().st_mode
        yield path, here, stat.S_ISDIR(mode), os.readlink(here) if stat.S_ISLNK(mode) else None
        if stat.S_ISDIR(mode):
            ahead += [(f"{path}/{name}" if path else name, here / name) for name in sorted(os.listdir(here))]


def _list_parents(path: str) -> list[str]:
    """The folders that a path is in, but for the root."""
    return [path[:end] for end, letter in enumerate(path) if letter == "/" and end]


def is_unchecked_bytecode(file: Path) -> bool:
    """Whether it is compiled Python that is run without a look at its source."""
    if not file.name.endswith(BYTECODE_SUFFIXES) or not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as opened:
        return int.from_bytes(opened.read(8)[4:], "little") == _UNCHECKED_HASH


def _has_same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and not one.is_symlink() and one.read_bytes() == other.read_bytes()


async def collect_artifacts(work: GradingContext, config: TransferConfig) -> CollectedArtifacts:
    """Copies of what `artifacts` names. A path that isn't there is UngradableWorkError; a glob may well match
    nothing."""
    scratch = _make_scratch_folder(work)
    taken = CollectedArtifacts([], [], scratch)
    for number, artifact in enumerate(config.artifacts):
        here = scratch / str(number)
        inside = to_absolute(work.agent_runtime, artifact)
        if inside == "/":
            raise GraderError("The whole root can't be carried: name `artifacts`, or another `workdir`.")
        if _GLOB_CHARS.isdisjoint(artifact):
            # With links that lead elsewhere, such as that of a virtual environment to its Python: they go into the
            # fresh runtime as they are, and are not followed here.
            await _collect(work, inside, here, config.max_mb, all_links=True)
            taken.copies.append(ArtifactCopy(inside, here))
            continue
        glob = _split_glob(inside)
        taken.globs.append(glob)
        try:
            await _collect(work, glob.folder, here, config.max_mb)
        except MissingArtifactError:
            continue
        for path in await asyncio.to_thread(glob.list_matches, here):
            taken.copies.append(ArtifactCopy(path, here / posixpath.relpath(path, glob.folder)))
    return taken


async def _collect(
    work: GradingContext, runtime_path: str, local_path: Path, max_mb: int, *, all_links: bool = False
) -> None:
    try:
        await get(work.agent_runtime, runtime_path, local_path, max_mb * _MB, all_links=all_links)
    except ArtifactTooLargeError:
        if work.live:
            raise
        try:
            await get(await work.create_fresh_runtime(), runtime_path, local_path, max_mb * _MB)
        except ArtifactTooLargeError as error:
            raise GraderError(f"{runtime_path} is too large before any agent was there: raise `max_mb`.") from error
        except UngradableWorkError:
            pass
        raise


async def get(
    runtime: Runtime, runtime_path: str, destination: Path, max_bytes: int, *, all_links: bool = False
) -> None:
    """`Runtime.get`, with what the agent brought about told from what it didn't."""
    try:
        await runtime.get(runtime_path, destination, max_bytes=max_bytes, all_links=all_links)
    except TransferTooLargeError as error:
        raise ArtifactTooLargeError(str(error)) from error
    except OSError as error:
        if error.errno not in _AGENT_ERRNOS:
            raise SandboxError(f"{runtime_path} can't be taken: {error}.") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MissingArtifactError(f"{runtime_path} is not there.") from error
        raise UngradableWorkError(f"{runtime_path} can't be taken: {error.strerror}.") from error


async def upload_grader_files(work: GradingContext, runtime: Runtime, config: TransferConfig) -> None:
    """The grader's files. After the agent's work."""
    roots = _list_artifact_roots(runtime, config)
    for file in config.files:
        target, source = to_absolute(runtime, file.target), _read_upload_content(file)
        try:
            await _ensure_real_folders(work, runtime, target, roots)
            if isinstance(file, UploadDir) and not any(is_below(root, target) for root in roots):
                await remove_folder(runtime, target)
            await runtime.put(source, target)
        except OSError as error:
            raise explain_put_error(runtime, target, error, live=work.live) from error


async def create_empty_file(work: GradingContext, runtime: Runtime, path: str, config: TransferConfig) -> str:
    """Whatever the agent left where the grader is to write is gone: an empty file is there. Returns where it is."""
    target = to_absolute(runtime, path)
    try:
        await _ensure_real_folders(work, runtime, target, _list_artifact_roots(runtime, config))
        await remove_folder(runtime, target)
    except OSError as error:
        raise explain_put_error(runtime, target, error, live=work.live) from error
    return target


def _list_artifact_roots(runtime: Runtime, config: TransferConfig) -> set[str]:
    """The folders that hold the agent's work."""
    artifacts = (to_absolute(runtime, path) for path in config.artifacts)
    globs = {path if _GLOB_CHARS.isdisjoint(path) else _split_glob(path).folder for path in artifacts}
    return {runtime.spec.workdir, *globs}


def _read_upload_content(file: UploadFile | UploadDir) -> Path | bytes:
    if file.source is None:
        return (file.content or "").encode()
    source = Path(file.source)
    if not (source.is_dir() if isinstance(file, UploadDir) else source.is_file()):
        raise GraderError(f"config.files: {source}, for {file.target}, is not there.")
    return source


async def _ensure_real_folders(work: GradingContext, runtime: Runtime, target: str, roots: set[str]) -> None:
    """Real folders in place of links of the agent's on the way to `target`, below the `roots`."""
    empty = _make_scratch_folder(work)
    empty.chmod(0o755)
    parent = posixpath.dirname(target)
    for end in (end for end, letter in enumerate(parent + "/") if letter == "/"):
        if any(is_below(parent[:end], root) and parent[:end] != root for root in roots):
            await runtime.put(empty, parent[:end])  # merged with a folder, in place of anything else


async def remove_folder(runtime: Runtime, path: str) -> None:
    """Removes a folder from outside: a file takes its place, and makes place for what is put there next."""
    try:
        await runtime.put(b"", path)
    except OSError as error:
        if error.errno != errno.EBUSY:  # else something is mounted there; it is empty now
            raise


async def delete(runtime: Runtime, paths: list[str]) -> None:
    """Removes files and folders of the agent's. Raises UngradableWorkError where it made that impossible."""
    try:
        await runtime.delete(paths)
    except OSError as error:
        raise UngradableWorkError(
            f"What the agent left can't be removed: {error.strerror} ({error.filename})."
        ) from error


def to_absolute(runtime: Runtime, path: str) -> str:
    """Relative paths are the workspace's."""
    return _join(runtime.spec.workdir, path)


def _join(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _split_glob(inside: str) -> Glob:
    parts = inside.split("/")
    first = next(index for index, part in enumerate(parts) if not _GLOB_CHARS.isdisjoint(part))
    return Glob("/".join(parts[:first]) or "/", "/".join(parts[first:]))


def _make_scratch_folder(work: GradingContext) -> Path:
    return Path(tempfile.mkdtemp(prefix="carried-", dir=work.scratch))


def limit_evidence(evidence: list[Evidence]) -> list[Evidence]:
    """As much of it as a verdict holds: an agent can leave any number of files."""
    return sorted(evidence, key=lambda one: not one.proven)[:_MAX_EVIDENCE]


def explain_put_error(runtime: Runtime, path: str, error: OSError, *, live: bool = False) -> PolarError:
    """What `put` could not do, with what the agent brought about told from what it didn't. `live`: the runtime is the
    agent's own."""
    if error.errno in _DISK_FULL_ERRNOS and runtime.spec.limits.disk_mb is not None:
        return UngradableWorkError(f"What the agent left fills the disk: there is no room for {path}.")
    if live and error.errno in _AGENT_ERRNOS:
        return UngradableWorkError(f"What the agent left keeps {path} out: {error.strerror}.")
    return SandboxError(f"{path} can't be put into the runtime: {error}.")

"""Transfers an agent's work into a runtime that no agent has been in.

    collect_artifacts (agent's runtime to this machine) -> put_into (the fresh runtime) -> upload_grader_files

`prepare_grading` does all three.

Everything happens from outside, through `get` and `put`: no shell resolves anything that an agent left, and its links
are not followed. An artifact is *replaced* in the fresh runtime: what the agent deleted is gone there.

Not every collected file is transferred (`_TransferFilter`):

- Links only where links.py allows it.
- Nothing where the grader's files will be. A folder that contains a file of the grader is the grader's, unless it
  existed before the agent, or contains the workspace or an artifact.
- No compiled Python, which would run in place of its source, unless an artifact or the instruction names it.
- In a folder that the grader's Python imports from (one that its files share with the agent's, or one in PYTHONPATH),
  no added module with the name of a standard, installed or grader's module, unless an artifact or the instruction
  names it.
- In a folder of PATH, no program with the name of one that is found elsewhere, and no link on the way there.

An uploaded folder replaces what had its name; only one that is or contains the workspace or an artifact is merged. In
the agent's own runtime (`refresh_runtime = false`), the same files are removed.

Work that can't be collected by the agent's fault raises `UngradableWorkError` (a reward of 0), a failure of the
platform SandboxError, a mistake of the task's author GraderError.
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
"""Suffixes of files that Python imports."""

_AUTO_IMPORTED_MODULES = ("sitecustomize", "usercustomize")  # modules that Python imports by itself

# Prints which of the modules on the command line are installed outside of the folder in the first argument.
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

# Prints the search paths of programs and modules.
_PRINT_SEARCH_PATHS = 'printf "%s\\n" "$PATH" "$PYTHONPATH"'

# Prints which of the programs on the command line are found in the folders of the first argument.
_PRINT_FOUND = 'PATH=$1; shift; for name; do command -v -- "$name" > /dev/null && printf "%s\\n" "$name"; done; true'

_CWD_IMPORT_PATTERN = re.compile(r"\bpython[\d.]*\s+(?:-(?!I|P)\w+\s+)*-[mc]\b")
_MAX_EVIDENCE = 100
_MAX_MODULES = 5000
_LISTING_SECONDS = 60.0
_UNCHECKED_HASH = 1  # flags of a .pyc that Python runs without checking its source

# Errors of `get` that an agent can cause by the files that it leaves.
_AGENT_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EINVAL}
_AGENT_ERRNOS |= {errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EOVERFLOW, errno.EILSEQ}
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


def _validate_path(path: str) -> str:
    if not path or ".." in path.split("/"):
        raise ValueError(f"{path!r} is neither a path below the workspace nor an absolute one without `..`")
    return posixpath.normpath(path)


RuntimePath = Annotated[str, AfterValidator(_validate_path)]
"""A path in the runtime; a relative one is relative to the workspace."""


GraderFile = Annotated[UploadFile | UploadDir, Field(discriminator="type")]


class TransferConfig(RequestModel):
    """The part of an evaluator's config that selects what is transferred."""

    artifacts: list[RuntimePath] = Field(["."], description="paths or globs; relative ones are the workspace's")
    files: list[GraderFile] = Field([], description="the grader's own, put over the agent's")
    max_mb: int = Field(1024, gt=0, description="of each artifact")

    def list_output_paths(self) -> list[str]:
        """Further paths that the grader writes to."""
        return []

    def list_import_folders(self) -> list[str]:
        """Further folders that the grader's Python imports from."""
        return []


class MissingArtifactError(UngradableWorkError):
    """There is no file or folder of that name (links don't count)."""


class ArtifactTooLargeError(UngradableWorkError):
    """The artifact is larger than the limit."""


class ArtifactCopy(Struct, frozen=True):
    """A copy of one of the agent's paths on this machine."""

    runtime_path: str
    local_path: Path


class Glob(Struct, frozen=True):
    """A pattern below a folder without wildcards."""

    folder: str
    pattern: str

    def list_matches(self, local_path: Path) -> list[str]:
        """Matches in a copy of the folder, as absolute runtime paths; nothing below another match."""
        if not local_path.is_dir():
            return []
        literal = local_path / self.pattern  # a name may have a bracket in it
        matches = [literal] if literal.exists() else sorted(local_path.glob(self.pattern))
        paths: list[str] = []
        for path in matches:
            inside = _join(self.folder, path.relative_to(local_path).as_posix())
            if not any(is_below(inside, other) for other in paths):
                paths.append(inside)
        return paths


class CollectedArtifacts(Struct, frozen=True):
    """Copies of the agent's work in the scratch folder."""

    copies: list[ArtifactCopy]
    globs: list[Glob]
    scratch: Path

    async def put_into(self, fresh: Runtime) -> None:
        """Replaces the artifacts in a fresh runtime."""
        await self._remove_glob_matches(fresh)
        for copy in self.copies:
            try:
                if copy.local_path.is_dir():
                    await remove_folder(fresh, copy.runtime_path)
                await fresh.put(copy.local_path, copy.runtime_path)
            except OSError as error:
                raise explain_put_error(fresh, copy.runtime_path, error) from error

    async def _remove_glob_matches(self, fresh: Runtime) -> None:
        stale_paths: list[str] = []
        for number, glob in enumerate(self.globs):
            local_path = self.scratch / f"prepared-{number}"
            try:
                await fresh.get(glob.folder, local_path, max_bytes=1 << 40)
            except FileNotFoundError:
                continue
            stale_paths += await asyncio.to_thread(glob.list_matches, local_path)
        await fresh.delete(stale_paths)


class PreparedGrading(Struct, frozen=True):
    """A runtime with the agent's work and the grader's files, and the evidence found on the way."""

    runtime: Runtime
    evidence: list[Evidence]


async def prepare_grading(
    work: GradingContext, config: TransferConfig, env: dict[str, str] | None = None
) -> PreparedGrading:
    """Prepares a runtime with the agent's work and the grader's files over it. `env` are the grader's variables besides
    the runtime's. Raises UngradableWorkError.

    If the task asked for the agent's own runtime, that is cleaned up instead."""
    if not work.live:
        artifacts = await collect_artifacts(work, config)
        runtime = await work.create_fresh_runtime()
        transfer_filter = await _TransferFilter.create(work, runtime, config, artifacts, env)
        await asyncio.to_thread(transfer_filter.prune)
        await replace(
            artifacts,
            copies=[copy for copy in artifacts.copies if copy.runtime_path not in transfer_filter.dropped_paths],
        ).put_into(runtime)
        await upload_grader_files(work, runtime, config)
        return PreparedGrading(runtime, limit_evidence(transfer_filter.evidence))
    runtime = await work.create_fresh_runtime()
    evidence = await _clean_up(work, runtime, config, env)
    await upload_grader_files(work, runtime, config)
    return PreparedGrading(runtime, evidence)


async def _clean_up(
    work: GradingContext, runtime: Runtime, config: TransferConfig, env: dict[str, str] | None
) -> list[Evidence]:
    """Removes from the agent's runtime what would not be transferred to a fresh one. A workspace that was too large to
    copy before the agent began is left as it is."""
    workdir = runtime.spec.workdir
    shared = find_grader_paths(work, runtime, config).shared
    tops = {folder for folder in shared if not is_below(folder, workdir) and not is_below(workdir, folder)}
    if work.initial_workspace is not None:
        tops.add(workdir)
    scratch = _make_scratch_folder(work)
    artifacts = CollectedArtifacts([], [], scratch)
    for number, top in enumerate(sorted(tops)):
        try:
            await get(runtime, top, scratch / str(number), config.max_mb * _MB, all_links=True)
        except MissingArtifactError:
            continue
        artifacts.copies.append(ArtifactCopy(top, scratch / str(number)))
    transfer_filter = await _TransferFilter.create(work, runtime, config, artifacts, env)
    await delete(runtime, transfer_filter.dropped_roots)
    return limit_evidence(transfer_filter.evidence)


class GraderPaths(Struct, frozen=True):
    """Where the grader's files will be, as absolute paths."""

    files: list[str]  # files and folders that are uploaded or written to
    folders: list[str]  # folders that belong to the grader with everything in them
    shared: list[str]  # folders of the agent that the grader's Python imports from

    @property
    def folders_and_files(self) -> list[str]:
        return [*self.folders, *self.files]


def find_grader_paths(work: GradingContext, runtime: Runtime, config: TransferConfig) -> GraderPaths:
    """A folder that contains a file of the grader belongs to it, unless it existed before the agent or contains its
    work."""
    roots, workdir = _list_artifact_roots(runtime, config), runtime.spec.workdir
    outputs, shared_folders = (
        [to_absolute(runtime, path) for path in paths]
        for paths in (config.list_output_paths(), config.list_import_folders())
    )
    grader_paths = GraderPaths(outputs, [], shared_folders)
    for file in config.files:
        target = to_absolute(runtime, file.target)
        if isinstance(file, UploadDir) and not any(is_below(root, target) for root in roots):
            grader_paths.folders.append(target)
            continue
        uploaded = (
            [_join(target, path) for path in _list_upload_files(file)] if isinstance(file, UploadDir) else [target]
        )
        for path in uploaded:
            folder = posixpath.dirname(path)
            shared = any(is_below(root, folder) for root in roots) or _existed_before(work, workdir, folder)
            grader_paths.files.append(path)
            (grader_paths.shared if shared else grader_paths.folders).append(folder)
    return grader_paths


class SearchFolders(Struct, frozen=True):
    """Folders of the workspace in the grader's PATH and PYTHONPATH, as absolute paths."""

    programs: list[str]
    modules: list[str]
    other_programs: str  # the rest of PATH

    @property
    def folders_and_parents(self) -> set[str]:
        return {above for folder in (*self.programs, *self.modules) for above in (folder, *_list_parents(folder))}


async def find_search_folders(runtime: Runtime, env: dict[str, str] | None, scratch: Path) -> SearchFolders:
    """Finds the search folders of a program that is started with `env` in the workspace."""
    lines = await _print_lines(runtime, [_PRINT_SEARCH_PATHS], scratch, env)
    path, python_path = (line.split(":") for line in (*lines, "", "")[:2])
    workdir, real = runtime.spec.workdir, runtime.path(runtime.spec.workdir)

    def find_inside(folders: list[str]) -> dict[str, str]:
        resolved = {folder: posixpath.normpath(posixpath.join(real, folder)) for folder in folders}
        return {
            folder: _join(workdir, posixpath.relpath(real_folder, real))
            for folder, real_folder in resolved.items()
            if is_below(real_folder, real)
        }

    programs = find_inside(path if lines else [])
    modules = find_inside([folder for folder in python_path if folder])
    others = ":".join(folder for folder in path if folder not in programs)
    return SearchFolders(list(programs.values()), list(modules.values()), others)


async def find_programs(runtime: Runtime, names: set[str], folders: str, scratch: Path) -> set[str]:
    """Which of the programs exist in `folders`, written as in PATH."""
    usual = sorted(name for name in names if re.fullmatch(r"[\w.+\[-]+", name))[:_MAX_MODULES]
    return set(await _print_lines(runtime, [_PRINT_FOUND, "sh", folders, *usual], scratch)) if usual else set()


async def _print_lines(
    runtime: Runtime, script: list[str], scratch: Path, env: dict[str, str] | None = None
) -> list[str]:
    """The lines that a shell script prints; none where the runtime has no shell."""
    with tempfile.NamedTemporaryFile(prefix="lines-", dir=scratch) as listing:
        await runtime.run(
            ["/bin/sh", "-c", *script], env=env, cwd="/", timeout=_LISTING_SECONDS, output=Path(listing.name)
        )
        return listing.read().decode(errors="surrogateescape").splitlines()


def find_file_names(instruction: str) -> frozenset[str]:
    """Words of an instruction that look like file names."""
    return frozenset(re.findall(r"(?<![\w.-])[\w-]+(?:\.[\w-]+)+", instruction))


async def find_installed_modules(runtime: Runtime, names: set[str], scratch: Path) -> set[str]:
    """Which of the modules Python has in a fresh runtime: standard and installed ones, except those installed from the
    workspace."""
    standard = {name for name in names if name in sys.stdlib_module_names}
    others = sorted(name for name in names - standard if name.isidentifier())
    if not others:
        return standard
    with tempfile.NamedTemporaryFile(prefix="modules-", dir=scratch) as listing:
        workdir = runtime.path(runtime.spec.workdir)
        argv = ["python3", "-c", _PRINT_INSTALLED, workdir, *others[:_MAX_MODULES]]
        await runtime.run(argv, cwd="/", timeout=_LISTING_SECONDS, output=Path(listing.name))
        installed = listing.read().decode(errors="replace").splitlines()
    return standard | (set(installed) & names)


def imports_from_cwd(command: str) -> bool:
    """Whether a command starts Python so that it imports from its working directory."""
    return _CWD_IMPORT_PATTERN.search(command) is not None


def _existed_before(work: GradingContext, workdir: str, folder: str) -> bool:
    """Whether a folder existed before the agent. In a live runtime, any folder outside of the workspace may have."""
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
    """Drops files that must not be transferred, and collects the evidence that they are."""

    def __init__(self, entries: dict[str, _CopiedEntry], workdir: str, before: dict[str, Path]) -> None:
        """`before` are the files of the workspace before the agent; empty where unknown."""
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
        artifacts: CollectedArtifacts,
        env: dict[str, str] | None,
    ) -> "_TransferFilter":
        entries = await asyncio.to_thread(_index_entries, artifacts.copies)
        workdir = runtime.spec.workdir
        before = (
            {}
            if work.initial_workspace is None
            else await asyncio.to_thread(_list_files, workdir, work.initial_workspace)
        )
        transfer_filter = cls(entries, workdir, before)
        grader_paths = find_grader_paths(work, runtime, config)
        named = {to_absolute(runtime, path) for path in config.artifacts}
        mentioned = find_file_names(work.task.instruction)
        named |= {
            path for path, entry in entries.items() if not entry.is_folder and posixpath.basename(path) in mentioned
        }
        search = await find_search_folders(runtime, env, work.scratch)
        grader_paths = replace(grader_paths, shared=[*grader_paths.shared, *search.modules])
        installed = await find_installed_modules(
            runtime, transfer_filter._find_added_modules(grader_paths.shared), work.scratch
        )
        names = await asyncio.to_thread(transfer_filter._find_changed_programs, search.programs)
        programs = await find_programs(runtime, set(names.values()), search.other_programs, work.scratch)
        suspects = {path for path, name in names.items() if name in programs}
        suspects |= {
            path for path in search.folders_and_parents & entries.keys() if transfer_filter._is_agent_link(path)
        }
        await asyncio.to_thread(transfer_filter._drop_files, grader_paths, named, installed, suspects)
        await transfer_filter._drop_links(work, runtime, grader_paths, artifacts)
        return transfer_filter

    def prune(self) -> None:
        """Removes dropped files from the copies on this machine."""
        for path in self.dropped_roots:
            local_path = self._entries[path].local_path
            if self._entries[path].is_folder:
                shutil.rmtree(local_path, ignore_errors=True)
            else:
                local_path.unlink(missing_ok=True)

    def _find_added_modules(self, shared: list[str]) -> set[str]:
        """Names of modules that the agent added to folders that the grader's Python imports from."""
        return {
            posixpath.basename(path).split(".")[0]
            for path, entry in self._entries.items()
            if path not in self._before and self._is_module(path, entry.is_folder, shared)
        }

    def _find_changed_programs(self, folders: list[str]) -> dict[str, str]:
        """Programs that the agent added to or changed in the folders: names by path."""
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

    def _drop_files(
        self, grader_paths: GraderPaths, requested: set[str], installed: set[str], suspects: set[str]
    ) -> None:
        """`requested` are paths that an artifact or the instruction names; `suspects` are dropped unless requested."""
        on_the_way = {above for place in grader_paths.folders_and_files for above in _list_parents(place)}
        for path, entry in self._entries.items():
            added = path not in self._before
            if any(is_below(path, place) for place in grader_paths.folders_and_files):
                if added and not entry.is_folder:
                    planted = self._is_before_known and entry.target is None and self._is_hidden(path)
                    self.evidence.append(Evidence("grader_path", escape_path(path), proven=planted))
                self._drop(path)
            elif path in on_the_way and not entry.is_folder:
                self._drop(path)
            elif path not in requested and self._is_compiled(path, entry):
                if added and is_unchecked_bytecode(entry.local_path) and "site-packages" not in path:
                    detail = "A compiled file that Python runs without checking its source."
                    self.evidence.append(Evidence("grader_environment", escape_path(path), proven=True, detail=detail))
                self._drop(path)
            elif path in suspects and path not in requested:
                detail = "A program that would be started in place of another one."
                self.evidence.append(Evidence("grader_environment", escape_path(path), detail=detail))
                self._drop(path)
            elif added and path not in requested and self._shadows_module(path, entry, grader_paths, installed):
                detail = "A module that Python would import in place of another one."
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
        self, work: GradingContext, runtime: Runtime, grader_paths: GraderPaths, artifacts: CollectedArtifacts
    ) -> None:
        remaining = {
            path: entry
            for path, entry in self._entries.items()
            if self.dropped_paths.isdisjoint((path, *_list_parents(path)))
        }
        link_targets = {path: entry.target for path, entry in remaining.items() if entry.target is not None}
        agent_links = [path for path, target in link_targets.items() if not self._is_link_of_task(path, target)]
        carried = TransferredEntries(
            {path: entry.target for path, entry in remaining.items()},
            frozenset(copy.runtime_path for copy in artifacts.copies),
        )
        refused_links = await links.find_refused_links(
            carried,
            agent_links,
            grader_paths.folders_and_files,
            agent=work.agent_runtime,
            fresh=runtime,
            scratch=work.scratch,
        )
        for link in refused_links:
            proven = self._is_before_known and link.enters_grader_paths and link.resolved_path not in self._before
            self.evidence.append(link.to_evidence(proven=proven))
            self._drop(link.path)

    def _is_hidden(self, path: str) -> bool:
        """Whether a hidden folder or name is on the path, which no task has to do with."""
        return any(part.startswith(".") for part in path.removeprefix(self._workdir).split("/"))

    def _shadows_module(self, path: str, entry: _CopiedEntry, grader_paths: GraderPaths, installed: set[str]) -> bool:
        """Whether Python would import it automatically, or in place of an installed or a grader's module."""
        stem = posixpath.basename(path).split(".")[0]
        if self._is_module(path, entry.is_folder, grader_paths.shared):
            return (
                stem in (*installed, *_AUTO_IMPORTED_MODULES)
                or _join(posixpath.dirname(path), f"{stem}.py") in grader_paths.files
            )
        return (
            stem in _AUTO_IMPORTED_MODULES
            and "site-packages" not in path
            and self._is_module(path, entry.is_folder, None)
        )

    def _is_module(self, path: str, is_folder: bool, folders: list[str] | None) -> bool:
        """Whether it can be imported by its name, from one of the folders."""
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


def _index_entries(copies: list[ArtifactCopy]) -> dict[str, _CopiedEntry]:
    """All collected entries by absolute path; a folder before its content."""
    return {
        _join(copy.runtime_path, path) if path else copy.runtime_path: _CopiedEntry(local_path, is_folder, target)
        for copy in copies
        for path, local_path, is_folder, target in walk(copy.local_path)
    }


def _list_files(runtime_path: str, top: Path) -> dict[str, Path]:
    return {_join(runtime_path, path) if path else runtime_path: local_path for path, local_path, _, _ in walk(top)}


def walk(top: Path) -> Iterator[tuple[str, Path, bool, str | None]]:
    """Entries at and below a copy: relative path, file, whether it is a folder, a link's target."""
    if not os.path.lexists(top):
        return
    pending = [("", top)]
    while pending:
        path, local_path = pending.pop()
        mode = local_path.lstat().st_mode
        yield path, local_path, stat.S_ISDIR(mode), os.readlink(local_path) if stat.S_ISLNK(mode) else None
        if stat.S_ISDIR(mode):
            pending += [
                (f"{path}/{name}" if path else name, local_path / name) for name in sorted(os.listdir(local_path))
            ]


def _list_parents(path: str) -> list[str]:
    """The folders above a path, without the root."""
    return [path[:end] for end, letter in enumerate(path) if letter == "/" and end]


def is_unchecked_bytecode(file: Path) -> bool:
    """Whether Python runs this compiled file without checking its source."""
    if not file.name.endswith(BYTECODE_SUFFIXES) or not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as opened:
        return int.from_bytes(opened.read(8)[4:], "little") == _UNCHECKED_HASH


def _has_same_bytes(first: Path, second: Path) -> bool:
    return first.is_file() and not first.is_symlink() and first.read_bytes() == second.read_bytes()


async def collect_artifacts(work: GradingContext, config: TransferConfig) -> CollectedArtifacts:
    """Copies the artifacts. A missing path raises UngradableWorkError; a glob may match nothing."""
    scratch = _make_scratch_folder(work)
    artifacts = CollectedArtifacts([], [], scratch)
    for number, artifact in enumerate(config.artifacts):
        local_path = scratch / str(number)
        runtime_path = to_absolute(work.agent_runtime, artifact)
        if runtime_path == "/":
            raise GraderError("The root folder can't be transferred: name `artifacts`, or another `workdir`.")
        if _GLOB_CHARS.isdisjoint(artifact):
            # Includes links that lead elsewhere, such as a virtual environment's to its Python: they are transferred
            # as they are, and not followed here.
            await _collect(work, runtime_path, local_path, config.max_mb, all_links=True)
            artifacts.copies.append(ArtifactCopy(runtime_path, local_path))
            continue
        glob = _split_glob(runtime_path)
        artifacts.globs.append(glob)
        try:
            await _collect(work, glob.folder, local_path, config.max_mb)
        except MissingArtifactError:
            continue
        for path in await asyncio.to_thread(glob.list_matches, local_path):
            artifacts.copies.append(ArtifactCopy(path, local_path / posixpath.relpath(path, glob.folder)))
    return artifacts


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
            raise GraderError(f"{runtime_path} is too large before the agent began: raise `max_mb`.") from error
        except UngradableWorkError:
            pass
        raise


async def get(
    runtime: Runtime, runtime_path: str, destination: Path, max_bytes: int, *, all_links: bool = False
) -> None:
    """Calls `Runtime.get`; its errors tell whether the agent or the platform is to blame."""
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
    return sorted(evidence, key=lambda item: not item.proven)[:_MAX_EVIDENCE]


def explain_put_error(runtime: Runtime, path: str, error: OSError, *, live: bool = False) -> PolarError:
    """What `put` could not do, with what the agent brought about told from what it didn't. `live`: the runtime is the
    agent's own."""
    if error.errno in _DISK_FULL_ERRNOS and runtime.spec.limits.disk_mb is not None:
        return UngradableWorkError(f"What the agent left fills the disk: there is no room for {path}.")
    if live and error.errno in _AGENT_ERRNOS:
        return UngradableWorkError(f"What the agent left keeps {path} out: {error.strerror}.")
    return SandboxError(f"{path} can't be put into the runtime: {error}.")

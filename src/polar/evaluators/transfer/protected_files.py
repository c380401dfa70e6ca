"""Protected files: tests and their configuration, of which the agent's version never counts.

They stay as the task prepared them: the agent's changes, additions and deletions are dropped. Everything else that the
agent changed is applied to a runtime that no agent has been in.

Protected are files with the usual names (`DEFAULT_GLOBS`), the tests that the task names, the grader's files, and
whatever would be imported in place of one of these: `tests.py` beside a folder `tests`, a package or an extension
module with the name of a test, compiled files.

In folders that the tests import from (the workspace, their own folders, those of PYTHONPATH), no module is added with
the name of a standard or installed one; nor a program in a folder of PATH with the name of another one. The agent's
links are transferred only where links.py allows it.
"""

import asyncio
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from msgspec import Struct
from pydantic import Field

from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError
from polar.evaluators.changes import LINK_MODE, FileChange, find_changes, list_entries
from polar.evaluators.transfer import links
from polar.evaluators.transfer.links import TransferredEntries, escape_path
from polar.evaluators.transfer.workspace import (
    BYTECODE_FOLDER,
    BYTECODE_SUFFIXES,
    MODULE_SUFFIXES,
    delete,
    explain_put_error,
    find_file_names,
    find_installed_modules,
    find_programs,
    find_search_folders,
    get,
    is_unchecked_bytecode,
    limit_evidence,
    walk,
)
from polar.records.session import Evidence
from polar.records.task import RequestModel
from polar.runtimes.base import Runtime, TransferTooLargeError

_MB = 1 << 20
_PACKAGE_FILE = "__init__.py"

DEFAULT_GLOBS = (
    # tests
    "**/tests/**",
    "test/**",
    "test_*.py",
    "*_test.py",
    "tests.py",
    "conftest.py",
    # what pytest and those who start it read
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "setup.cfg",
    "tox.ini",
    "tox.toml",
    "pyproject.toml",
    "noxfile.py",
    ".coveragerc",
    ".python-version",
    # what Python runs or looks up by itself; entry points are how pytest finds plug-ins
    "*.pth",
    "*.egg-link",
    "sitecustomize.py",
    "usercustomize.py",
    "**/*.egg-info/**",
    "**/*.dist-info/**",
    # what is run in the place of its source
    "*.pyc",
    "*.pyo",
)
_PACKAGE_FILES_PATTERN = re.compile(
    r"(.*/)?[^/]*\.(pth|egg-link|pyc|pyo)|(.*/)?[^/]*\.(egg|dist)-info(/.*)?", re.DOTALL
)
"""What installing a package changes."""

_AUTO_IMPORTED_MODULES = (
    "sitecustomize",
    "usercustomize",
    "conftest",
)  # modules that Python or pytest imports by itself


class ProtectionConfig(RequestModel):
    """The part of an evaluator's config that selects the protected files."""

    protected: list[str] = Field([], description="globs, besides the usual ones; a name without / anywhere")
    allowed: list[str] = Field([], description="globs of files that are not protected after all")
    max_mb: int = Field(1024, gt=0, description="of the workspace")


class ProtectedFiles:
    def __init__(
        self,
        config: ProtectionConfig,
        *,
        files: Iterable[str] = (),
        folders: Iterable[str] = (),
        named: Iterable[str] = (),
        globs: Iterable[str] = (),
    ) -> None:
        """The grader's `files` and `folders` are protected even if `allowed`. `named` are the tests that the task
        names, as paths or dotted names."""
        self._globs = _compile_globs([*DEFAULT_GLOBS, *globs, *config.protected])
        self._allowed = _compile_globs(config.allowed)
        self._files = frozenset(files)
        self._folders = frozenset(folders)
        self._named = list(named)

    def covers(self, path: str) -> bool:
        """Whether a file is protected: by itself, by a folder above it, or because it would replace a protected one."""
        places = _add_parents(path)
        if not (self._files | self._folders).isdisjoint(places):
            return True
        return any(self._globs.fullmatch(place) for place in places) and not self._allowed.fullmatch(path)

    def list_protected(self, prepared: list[str]) -> set[str]:
        """The protected files that exist before the agent, and the grader's."""
        existing = {*prepared, *self._files}
        tests = {path for path in _find_test_files(self._named, existing) if not self._allowed.fullmatch(path)}
        return tests | {path for path in existing if self.covers(path)}

    def split_changes(
        self, changed: list[FileChange], prepared: list[str], files: set[str]
    ) -> tuple[list[FileChange], list[FileChange]]:
        """Splits changes into those that count and those that are dropped. `prepared` are the paths before the agent,
        `files` the protected ones among them; no change may replace a folder that contains one."""
        holding = {str(parent) for path in [*files, *self._folders] for parent in PurePosixPath(path).parents}
        modules = _ProtectedModules(files, prepared)
        kept: list[FileChange] = []
        dropped: list[FileChange] = []
        for change in changed:
            path = change.path
            is_protected = path in files or path in holding or self.covers(path)
            is_protected = is_protected or (not self._allowed.fullmatch(path) and modules.are_affected_by(change))
            (dropped if is_protected else kept).append(change)
        return kept, dropped

    def allows(self, path: str) -> bool:
        return self._allowed.fullmatch(path) is not None

    @property
    def grader_paths(self) -> list[str]:
        """The grader's own files and folders."""
        return sorted(self._files | self._folders)


class _ProtectedModules:
    """Decides which files would be imported under the name of a protected one."""

    def __init__(self, protected: Iterable[str], prepared: Iterable[str]) -> None:
        existing = frozenset(prepared)
        self._modules: set[str] = set()  # paths without their suffix
        self._folders: set[str] = set()  # that protected modules are in
        self._packages: set[str] = set()  # folders whose __init__.py says what their modules are called
        for path in protected:
            if not path.endswith(".py"):
                continue
            self._modules.add(path.removesuffix(".py"))
            parents = [str(parent) for parent in PurePosixPath(path).parents]
            self._folders.update(parents)
            for folder in parents:
                self._packages.add(folder)
                if f"{folder}/{_PACKAGE_FILE}" not in existing:
                    break

    def are_affected_by(self, change: FileChange) -> bool:
        """Whether adding or deleting a file changes what is imported."""
        if change.before is not None and change.after is not None:
            return False
        path = change.path
        folder, _, name = path.rpartition("/")
        if name == _PACKAGE_FILE and (folder or ".") in self._packages:
            return True
        if change.before is not None:
            return False
        stem = name.split(".")[0]
        module = f"{folder}/{stem}" if folder else stem
        parents = _add_parents(path)[1:]
        if not self._modules.isdisjoint(parents) or any(
            PurePosixPath(parent).name in _AUTO_IMPORTED_MODULES for parent in parents
        ):
            return True  # a package in place of a module
        return name.endswith(MODULE_SUFFIXES) and (
            module in self._modules or module in self._folders or stem in _AUTO_IMPORTED_MODULES
        )


def _find_test_files(named: Iterable[str], existing: set[str]) -> set[str]:
    """The files of tests named as `a/b.py::test_c`, `a.b.Class.test_c`, `test_c (a.b.Class)`, `a/b.py` or `a.b`."""
    by_module: dict[str, list[str]] = {}  # by the last part of its name
    for path in existing:
        if path.endswith(".py"):
            by_module.setdefault(_to_module_path(path).rpartition("/")[2], []).append(path)
    files: set[str] = set()
    dotted: set[str] = set()
    for name in named:
        file = re.sub(r"^\./", "", name.partition("::")[0])
        in_brackets = re.fullmatch(r"\S+ \(([\w.]+)\)", name)
        if file in existing:
            files.add(file)
        else:
            dotted.add(in_brackets[1] if in_brackets else file)
    for name in dotted:
        files.update(_find_by_dotted_name(name.split("."), by_module))
    return files


def _to_module_path(path: str) -> str:
    """The path of a Python file without its suffix; a package's is that of its folder."""
    return path.removesuffix(".py").removesuffix("/__init__")


def _find_by_dotted_name(parts: list[str], by_module: dict[str, list[str]]) -> list[str]:
    """The files of the longest beginning that is a module: behind it stand at most a class and a test. Tests are often
    started in a folder of the workspace, so the module may be below one; but not where it has a single name, which
    may well be that of the code."""
    for count in range(len(parts), max(len(parts) - 3, 0), -1):
        module_path = "/".join(parts[:count])
        paths = [(path, _to_module_path(path)) for path in by_module.get(parts[count - 1], [])]
        if matches := [
            path
            for path, module in paths
            if module == module_path or (count > 1 and module.endswith(f"/{module_path}"))
        ]:
            return matches
    return []


class WorkspaceDiff(Struct, frozen=True):
    """The agent's workspace compared with the one that it was given, on this machine."""

    before: Path
    after: Path
    kept: list[FileChange]
    dropped: list[FileChange]
    refused_links: list[str]  # the agent's links that are not transferred
    evidence: list[Evidence]


async def diff_workspace(
    work: GradingContext,
    fresh: Runtime,
    protected: ProtectedFiles,
    config: ProtectionConfig,
    env: dict[str, str] | None = None,
) -> WorkspaceDiff:
    """Compares the agent's workspace with the original. `env` are the tests' variables besides the runtime's. Raises
    UngradableWorkError where the agent's workspace can't be copied, by its own fault."""
    folder = Path(tempfile.mkdtemp(dir=work.scratch))
    before, workdir = work.initial_workspace, fresh.spec.workdir
    if before is None:
        before = folder / "before"
        try:
            await fresh.get(workdir, before, max_bytes=config.max_mb * _MB, all_links=True)
        except TransferTooLargeError as error:
            raise GraderError(f"{workdir} is too large before the agent began: raise max_mb ({error})") from error
    after = folder / "after"
    await get(work.agent_runtime, workdir, after, config.max_mb * _MB, all_links=True)
    if not after.is_dir():
        raise UngradableWorkError(f"{workdir} is not a folder any more.")
    try:
        kept, dropped, evidence = await asyncio.to_thread(_compare, before, after, protected)
    except OSError as error:
        raise UngradableWorkError(f"{workdir} can't be compared: {error.strerror}.") from error
    shadows = await _find_shadows(work, fresh, before, kept, protected, env)
    detail = "It would be imported or started in place of another one."
    evidence += [Evidence("grader_environment", escape_path(path), detail=detail) for path in sorted(shadows)]
    dropped += [change for change in kept if change.path in shadows]
    kept = [change for change in kept if change.path not in shadows]
    refused = await _find_refused_links(work, fresh, before, after, kept, protected)
    evidence += [
        link.to_evidence(proven=link.enters_grader_paths and not _leads_to_prepared_file(link, before, workdir))
        for link in refused
    ]
    refused_links = [link.path.removeprefix(f"{workdir.rstrip('/')}/") for link in refused]
    counted = [change for change in kept if change.after is None or change.path not in refused_links]
    return WorkspaceDiff(before, after, counted, dropped, refused_links, limit_evidence(evidence))


async def _find_shadows(
    work: GradingContext,
    fresh: Runtime,
    before: Path,
    kept: list[FileChange],
    protected: ProtectedFiles,
    env: dict[str, str] | None,
) -> set[str]:
    """Changes that would replace a module or a program from outside of the workspace."""
    search = await find_search_folders(fresh, env, work.scratch)
    root = fresh.spec.workdir
    programs, modules = (
        {posixpath.relpath(folder, root) for folder in folders} for folders in (search.programs, search.modules)
    )
    prepared = await asyncio.to_thread(lambda: [path for path, _ in list_entries(before)])
    files = protected.list_protected(prepared)
    modules |= {".", *(str(PurePosixPath(path).parent) for path in files if path.endswith(".py"))}
    links_to_search = {
        posixpath.relpath(path, root) for path in search.folders_and_parents if links.is_below(path, root)
    }
    mentioned = find_file_names(work.task.instruction)
    written = [change for change in kept if change.after is not None and not protected.allows(change.path)]
    written = [change for change in written if PurePosixPath(change.path).name not in mentioned]
    shadows = {change.path for change in written if change.after and change.after.mode == LINK_MODE} & links_to_search
    started = {
        change.path: PurePosixPath(change.path).name for change in written if _get_parent(change.path) in programs
    }
    others = await find_programs(fresh, set(started.values()), search.other_programs, work.scratch)
    shadows |= {path for path, name in started.items() if name in others}
    tops = _find_added_modules(
        [change.path for change in written if change.before is None], frozenset(prepared), modules
    )
    installed = await find_installed_modules(fresh, {_get_stem(top) for top in tops}, work.scratch)
    shadowing = {top for top in tops if _get_stem(top) in installed}
    return shadows | {change.path for change in written if not shadowing.isdisjoint(_add_parents(change.path))}


def _find_added_modules(added: list[str], prepared: frozenset[str], folders: set[str]) -> set[str]:
    """Added files and packages that can be imported by their name from one of the folders."""
    tops = set()
    for path in added:
        name = PurePosixPath(path).name
        if name.endswith(MODULE_SUFFIXES):
            tops.add(_get_parent(path) if name.startswith("__init__.") else path)
    return {
        top
        for top in tops
        if _get_parent(top) in folders
        and prepared.isdisjoint(
            posixpath.normpath(posixpath.join(_get_parent(top), f"{_get_stem(top)}{end}"))
            for end in (".py", f"/{_PACKAGE_FILE}")
        )
    }


def _get_stem(path: str) -> str:
    return PurePosixPath(path).name.split(".")[0]


def _get_parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _compare(
    before: Path, after: Path, protected: ProtectedFiles
) -> tuple[list[FileChange], list[FileChange], list[Evidence]]:
    prepared = [path for path, _ in list_entries(before)]
    files = protected.list_protected(prepared)
    kept, dropped = protected.split_changes(find_changes(before, after), prepared, files)
    touched = [change for change in dropped if not _PACKAGE_FILES_PATTERN.fullmatch(change.path)]
    evidence = [
        Evidence("test_edited", escape_path(change.path), detail=f"It was {change.kind}.") for change in touched
    ]
    detail = "A compiled file that Python runs without checking its source."
    for path, local_path, _, _ in walk(after):
        if _find_bytecode_source(path) in files and is_unchecked_bytecode(local_path) and not (before / path).exists():
            evidence.append(Evidence("grader_environment", escape_path(path), proven=True, detail=detail))
    return kept, dropped, evidence


def _find_bytecode_source(path: str) -> str | None:
    """The source of a compiled Python file."""
    file = PurePosixPath(path)
    if file.suffix not in BYTECODE_SUFFIXES:
        return None
    folder = file.parent.parent if file.parent.name == BYTECODE_FOLDER else file.parent
    return str(folder / f"{file.name.split('.')[0]}.py")


async def _find_refused_links(
    work: GradingContext, fresh: Runtime, before: Path, after: Path, kept: list[FileChange], protected: ProtectedFiles
) -> list[links.RefusedLink]:
    """Refused links among the changes that count, resolved over the workspace with those changes applied."""
    link_paths = [change.path for change in kept if change.after is not None and change.after.mode == LINK_MODE]
    if not link_paths:
        return []
    root = fresh.spec.workdir.rstrip("/")
    resulting = await asyncio.to_thread(_list_resulting_entries, before, after, kept)
    carried = TransferredEntries(
        {f"{root}/{path}" if path else root: target for path, target in resulting.items()}, frozenset({root or "/"})
    )
    return await links.find_refused_links(
        carried,
        [f"{root}/{path}" for path in link_paths],
        [f"{root}/{place}" for place in protected.grader_paths],
        agent=work.agent_runtime,
        fresh=fresh,
        scratch=work.scratch,
    )


def _leads_to_prepared_file(link: links.RefusedLink, before: Path, workdir: str) -> bool:
    """Whether the link leads to something that the task prepared."""
    return link.resolved_path is not None and os.path.lexists(before / posixpath.relpath(link.resolved_path, workdir))


def _list_resulting_entries(before: Path, after: Path, kept: list[FileChange]) -> dict[str, str | None]:
    entries = {path: target for path, _, _, target in walk(before)}
    kinds = {path: (is_folder, target) for path, _, is_folder, target in walk(after)}
    for change in kept:
        if change.after is None:
            entries.pop(change.path, None)
    for change in kept:
        if change.after is not None:
            entries[change.path] = kinds[change.path][1]
            entries |= dict.fromkeys(_add_parents(change.path)[1:])
    return entries


async def apply_changes(diff: WorkspaceDiff, fresh: Runtime) -> None:
    """Applies the changes that count to a prepared workspace."""
    await _put_changes(fresh, diff.after, diff.kept)


async def restore_protected(diff: WorkspaceDiff, runtime: Runtime) -> None:
    """Restores the protected files in the agent's own runtime. Removes compiled files and refused links."""
    compiled = [path for path, _, _, _ in walk(diff.after) if PurePosixPath(path).name == BYTECODE_FOLDER]
    await delete(runtime, [f"{runtime.spec.workdir}/{path}" for path in [*compiled, *diff.refused_links]])
    await _put_changes(
        runtime, diff.before, [FileChange(change.path, change.after, change.before) for change in diff.dropped]
    )


async def _put_changes(runtime: Runtime, source: Path, changed: list[FileChange]) -> None:
    """Deletes first, since a new entry may have the name of a deleted one. Links on the way are replaced by folders."""
    await delete(runtime, [f"{runtime.spec.workdir}/{change.path}" for change in changed if change.after is None])
    present = [change.path for change in changed if change.after is not None]
    if present:
        with tempfile.TemporaryDirectory(dir=source.parent) as folder:
            await asyncio.to_thread(_gather, source, Path(folder), present)
            try:
                await runtime.put(Path(folder), runtime.spec.workdir)
            except OSError as error:
                raise explain_put_error(runtime, runtime.spec.workdir, error) from error


def _gather(source: Path, folder: Path, paths: list[str]) -> None:
    folder.chmod(0o755)
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target, follow_symlinks=False)


def _add_parents(path: str) -> list[str]:
    return [path, *(str(parent) for parent in PurePosixPath(path).parents[:-1])]


def _compile_globs(globs: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(_glob_to_regex, globs)) or r"(?!)", re.DOTALL)


def _glob_to_regex(glob: str) -> str:
    """`**/` is any folders or none, `/**` a folder and all in it, `*` and `?` stay within a name. A glob without a
    slash is a name anywhere."""
    if "/" not in glob:
        glob = "**/" + glob
    pieces = re.split(r"(\*\*/|/\*\*$|\*|\?)", glob)
    meant = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(meant.get(piece) or re.escape(piece) for piece in pieces)

"""What an agent changed of a whole machine, carried into a runtime that no agent has been in.

Some graders look at more than the workspace. But whatever programs read or load by themselves as they start (settings
in /etc and in the home, libraries, interpreters and their packages, programs in PATH) must be as the task prepared it,
or the agent's code runs in the grader. No list of such files can be complete, so it is the other way round: what the
agent changed counts

- in the workspace,
- in folders of the root that are not the system's (/srv, /data, /app, ...),
- and at the paths that the task names, wherever they are.

Files that stand in the root itself, hidden files there and in a home that is the workspace, and the prefix of each
folder in PATH (a virtual environment, say) are the system's, too. Owners, special permissions, devices, sockets and
pipes are not carried. Links are laid only where links.py allows it.
"""

import asyncio
import os
import posixpath
import tempfile
from pathlib import Path

from msgspec import Struct

from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError
from polar.evaluators.transfer import links
from polar.evaluators.transfer.links import TransferredEntries, escape_path, is_below
from polar.evaluators.transfer.workspace import (
    MODULE_SUFFIXES,
    ArtifactTooLargeError,
    delete,
    explain_put_error,
    find_installed_modules,
    find_search_folders,
    get,
    limit_evidence,
)
from polar.records.session import Evidence
from polar.runtimes.base import FileState, Runtime, SandboxError, TransferTooLargeError

_SYSTEM_NAMES = (
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "media", "node_modules", "opt", "proc"),
    *("root", "run", "sbin", "snap", "sys", "tmp", "usr", "var"),
)
SYSTEM_FOLDERS = frozenset(f"/{name}" for name in _SYSTEM_NAMES)
_REPORTED_FOLDERS = (
    "/etc",
    "/opt",
    "/root",
    "/usr/local",
    "/var/www",
)  # of the system's: where changes are looked for, to be shown
_MAX_REPORTED_PATHS = 50
_RESULTS_FOLDER = "/logs/verifier"
_USR_MERGE_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")  # links into /usr, in most images


class SystemTransfer(Struct, frozen=True):
    """A fresh runtime with what counts of the agent's changes, and what was seen on the way."""

    runtime: Runtime
    not_counted: list[str]  # some of what the agent changed elsewhere
    evidence: list[Evidence]


class _PathRules:
    """Which paths count."""

    def __init__(
        self, fresh: Runtime, counted_paths: list[str], search_path: list[str], grader_paths: list[str]
    ) -> None:
        """`search_path` are the folders in PATH."""
        self.workdir = posixpath.normpath(fresh.spec.workdir)
        self.counted_paths = [posixpath.normpath(path) for path in counted_paths]
        self._grader_paths = grader_paths
        self._home = posixpath.normpath(fresh.spec.home)
        self._prefixes = [prefix for folder in search_path if (prefix := self._find_prefix(folder)) is not None]

    def _find_prefix(self, folder: str) -> str | None:
        """What is installed together with the programs of a folder."""
        folder = posixpath.normpath(folder)
        above = posixpath.dirname(folder)
        if posixpath.basename(folder) in ("bin", "sbin") and not is_below(self.workdir, above):
            return above
        return None if is_below(self.workdir, folder) else folder

    def is_counted(self, path: str) -> bool:
        if any(is_below(path, place) for place in self._grader_paths):
            return False
        if any(is_below(path, name) for name in self.counted_paths):
            return True
        if any(is_below(path, prefix) for prefix in self._prefixes):
            return False
        if self.workdir != "/" and is_below(path, self.workdir):
            first = posixpath.relpath(path, self.workdir).split("/")[0]
            return self.workdir not in (self._home, "/root") or not first.startswith(".") or first == "."
        top = "/" + path.split("/")[1]
        return path != top and top not in SYSTEM_FOLDERS and not top.startswith("/.") and not is_below(path, self._home)

    def is_entirely_counted(self, folder: str) -> bool:
        """Whether everything below a folder counts that counts itself."""
        return not any(is_below(path, folder) for path in (*self._grader_paths, *self._prefixes))

    def list_counted_system_folders(self) -> list[str]:
        """Folders of the system's that something counts in."""
        return [path for path in (self.workdir, *self.counted_paths) if "/" + path.split("/")[1] in SYSTEM_FOLDERS]


async def transfer_changes(
    work: GradingContext,
    counted_paths: list[str],
    grader_paths: list[str],
    max_bytes: int,
    *,
    env: dict[str, str],
    from_workdir: bool,
) -> SystemTransfer:
    """The agent's changes that count, in a fresh runtime. `counted_paths` are those that the task counts
    besides, `env` the grader's variables, and `from_workdir` says that its Python imports from the workspace. Raises
    UngradableWorkError."""
    fresh = await work.create_fresh_runtime()
    rules = _PathRules(fresh, counted_paths, await _read_search_path(work, fresh, env), grader_paths)
    mounts = [mount.target for runtime in (work.agent_runtime, fresh) for mount in runtime.spec.mounts]
    try:
        before = await _list_entries(fresh, rules.list_counted_system_folders(), mounts)
    except TransferTooLargeError as error:
        raise GraderError(f"The runtime holds too much before any agent was there: {error}") from error
    try:
        after = await _list_entries(work.agent_runtime, rules.list_counted_system_folders(), mounts)
        not_counted = await _find_uncounted_changes(work.agent_runtime, fresh, rules)
    except (TransferTooLargeError, OSError) as error:
        raise UngradableWorkError(f"What the agent left can't be listed: {error}") from error
    paths = {path for path, state in after.items() if before.get(path) != state and rules.is_counted(path)}
    folders = set((await find_search_folders(fresh, env, work.scratch)).modules)
    folders |= {rules.workdir} if from_workdir else set()
    if folders:
        modules = [path for path in paths if path not in before and _is_module(path, folders, after, work)]
        stems = {posixpath.basename(path).split(".")[0] for path in modules}
        installed = await find_installed_modules(fresh, stems, work.scratch)
        shadows = [path for path in modules if posixpath.basename(path).split(".")[0] in installed]
        not_counted += map(escape_path, shadows)
        paths = {path for path in paths if not any(is_below(path, shadow) for shadow in shadows)}
    gone = [path for path in before if path not in after and rules.is_counted(path)]
    staging = Path(tempfile.mkdtemp(dir=work.scratch)) / "layer"
    new = [path for path in paths if path not in before and after[path].kind == "folder"]
    new_folders = [
        path
        for path in new
        if rules.is_entirely_counted(path) and not any(is_below(folder, path) for folder in folders)
    ]
    await _collect(work.agent_runtime, _keep_topmost(new_folders), paths, after, staging, max_bytes)
    await asyncio.to_thread(_set_modes, staging, before, after)
    evidence = _find_planted_results(after) + [Evidence("grader_environment", path) for path in not_counted]
    evidence += await _drop_links(work, fresh, staging, paths, before, after, grader_paths)
    await delete(fresh, _keep_topmost(gone))
    try:
        if staging.is_dir():
            await fresh.put(staging, "/")
    except OSError as error:
        raise explain_put_error(fresh, "/", error) from error
    return SystemTransfer(fresh, not_counted, limit_evidence(evidence))


async def _list_entries(runtime: Runtime, tops: list[str], mounts: list[str]) -> dict[str, FileState]:
    entries = await runtime.list_entries("/", exclude=[*SYSTEM_FOLDERS, *mounts])
    for top in tops:
        entries |= await runtime.list_entries(top, exclude=mounts)
    return entries


async def _find_uncounted_changes(agent: Runtime, fresh: Runtime, rules: _PathRules) -> list[str]:
    """For people: files of the system's that the agent added, or that are not as long as they were."""
    changed: list[str] = []
    for top in _REPORTED_FOLDERS:
        before = await fresh.list_entries(top)
        for path, state in (await agent.list_entries(top)).items():
            was = before.get(path)
            differs = was is None or (was.kind, was.size, was.target) != (state.kind, state.size, state.target)
            if differs and state.kind != "folder" and not rules.is_counted(path):
                changed.append(escape_path(path))
    return sorted(changed)[:_MAX_REPORTED_PATHS]


def _is_module(path: str, folders: set[str], after: dict[str, FileState], work: GradingContext) -> bool:
    """Whether Python imports it by its name from one of the folders, though the instruction does not ask for it."""
    folder, name = posixpath.split(path)
    if folder not in folders:
        return False
    if after[path].kind == "folder":
        return any(f"{path}/__init__{suffix}" in after for suffix in MODULE_SUFFIXES)
    return name.endswith(MODULE_SUFFIXES) and name not in work.task.instruction


def _find_planted_results(after: dict[str, FileState]) -> list[Evidence]:
    """Results that nobody but the grader writes."""
    planted = (path for path, state in after.items() if is_below(path, _RESULTS_FOLDER) and state.kind != "folder")
    return [Evidence("grader_path", escape_path(path), proven=True) for path in planted]


async def _read_search_path(work: GradingContext, fresh: Runtime, env: dict[str, str]) -> list[str]:
    listing = work.scratch / f"path-{fresh.id}"
    done = await fresh.run(["/bin/sh", "-c", 'printf "%s\\n" "$PATH"'], env=env, output=listing)
    if done.exit_code != 0:
        raise SandboxError(f"PATH of a fresh runtime can't be read: {done.exit_code}.")
    text = await asyncio.to_thread(listing.read_text, errors="surrogateescape")
    return [folder for folder in text.strip().split(":") if folder.startswith("/")]


async def _collect(
    agent: Runtime, folders: list[str], paths: set[str], after: dict[str, FileState], staging: Path, max_bytes: int
) -> None:
    """Copies of what is wanted, below `staging` as they will stand in the root. `whole` are folders of it."""
    remaining = max_bytes - sum(after[path].size for path in paths)
    if remaining < 0:
        raise ArtifactTooLargeError(f"What the agent changed is larger than {max_bytes} bytes.")
    for path in folders:
        await get(agent, path, staging / path.lstrip("/"), max_bytes, all_links=True)
    done = set(folders)
    for path in sorted(paths, key=lambda path: path.count("/")):
        if posixpath.dirname(path) in done or path in done:
            done.add(path)
            continue
        state, local_path = after[path], staging / path.lstrip("/")
        if state.kind == "folder":
            await asyncio.to_thread(local_path.mkdir, 0o755, parents=True, exist_ok=True)
        elif state.kind == "link":
            await asyncio.to_thread(_make_link, local_path, state.target or "")
        else:
            await get(agent, path, local_path, max_bytes)


def _make_link(local_path: Path, target: str) -> None:
    local_path.parent.mkdir(parents=True, exist_ok=True)
    local_path.symlink_to(target)


def _set_modes(staging: Path, before: dict[str, FileState], after: dict[str, FileState]) -> None:
    """Folders get the agent's permissions, those of the system's on the way keep the usual ones."""
    for folder, _, _ in os.walk(staging):
        path = posixpath.normpath("/" + os.path.relpath(folder, staging))
        state = after.get(path) or before.get(path)
        os.chmod(folder, 0o755 if state is None or path == "/" else state.mode & 0o777 | 0o700)


async def _drop_links(
    work: GradingContext,
    fresh: Runtime,
    staging: Path,
    paths: set[str],
    before: dict[str, FileState],
    after: dict[str, FileState],
    grader_paths: list[str],
) -> list[Evidence]:
    """Removes links that may not be laid from the copies."""
    laid = {path: after[path].target for path in paths}
    unchanged = {path: state.target for path, state in before.items() if path in after}
    if any(is_below(path, "/usr") for path in paths):
        for top in _USR_MERGE_LINKS:
            unchanged |= {path: state.target for path, state in (await fresh.list_entries(top)).items()}
    agent_links = [path for path, target in laid.items() if target is not None]
    refusals = await links.find_refused_links(
        TransferredEntries(unchanged | laid, frozenset()),
        agent_links,
        grader_paths,
        agent=work.agent_runtime,
        fresh=fresh,
        scratch=work.scratch,
    )
    for link in refusals:
        await asyncio.to_thread((staging / link.path.lstrip("/")).unlink, missing_ok=True)
    return [link.to_evidence(proven=link.enters_grader_paths and link.resolved_path not in before) for link in refusals]


def _keep_topmost(paths: list[str]) -> list[str]:
    """Without those whose folder is among them."""
    among = set(paths)
    return [path for path in paths if posixpath.dirname(path) not in among]

"""Links that an agent leaves: which of them may be laid into the runtime that grades its work.

The grader's files arrive after the agent is done. A link that leads to where they will stand would make the grader
compare its own file with itself. So a link is laid only where what it leads to was the agent's to show:

- it leads to a file or folder that is carried with it, or
- it leads to a file or folder of the runtime whose content is the same in the agent's own runtime, such as the
  interpreter of a virtual environment: the agent could as well have left a copy, or
- the task itself made it, at this path and with this target.

No link of the agent's may lead to, into or above a place of the grader's. Everything else is not laid. Links are
resolved here, step by step over the list of what is carried; only the part of a path that leaves it is resolved by the
fresh runtime, before anything of the agent's is there.
"""

import asyncio
import filecmp
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from polar.evaluators.base import UngradableWorkError
from polar.evaluators.changes import find_changes, list_entries
from polar.records.session import Evidence
from polar.runtimes.base import Runtime, SandboxError, TransferTooLargeError

_MAX_LINK_STEPS = 40  # links on the way of one path, as in the kernel
_MAX_FOLDER_BYTES = 64 << 20
_MAX_COMPARED_BYTES = 1 << 30  # that are compared, of all links of a session
_MAX_COMPARED_PATHS = 500  # files and folders
_MAX_SECONDS = 60.0  # for one look where paths lead

# For each line of standard input: what it leads to in the runtime, as `KIND PATH`.
_RESOLVE_SCRIPT = """
while IFS= read -r path; do
    real=$(readlink -f "$path") || real=
    if [ -z "$real" ]; then echo -
    elif [ -f "$real" ]; then printf 'f %s\\n' "$real"
    elif [ -d "$real" ]; then printf 'd %s\\n' "$real"
    else echo -
    fi
done
"""


class TransferredEntries(Struct, frozen=True):
    """What is laid into a runtime, by absolute path: where each link leads, None for files and folders."""

    entries: Mapping[str, str | None]
    roots: frozenset[str]
    """Nothing stands at or below these but what is in `entries`."""


class RefusedLink(Struct, frozen=True):
    """A link that is not laid."""

    path: str
    target: str
    resolved_path: str | None  # as far as it could be followed
    enters_grader_paths: bool  # it leads to or into a place of the grader's

    def evidence(self, *, proven: bool) -> Evidence:
        detail = escape_path(f"It leads to {self.target}.")
        return Evidence("link_out", escape_path(self.path), proven=proven, detail=detail)


class _LinkTarget(Struct, frozen=True):
    path: str | None  # None for a link that leads nowhere
    is_host_path: bool = False  # a path of the machine itself, in a runtime that has no root of its own


async def find_refused_links(
    carried: TransferredEntries,
    candidates: Iterable[str],
    grader_paths: Iterable[str],
    *,
    agent: Runtime,
    fresh: Runtime,
    scratch: Path,
) -> list[RefusedLink]:
    """Those of the links at `candidates` that may not be laid into `fresh`. `places` are the grader's: files, and
    folders that are its own. Raises UngradableWorkError where what the agent left keeps that from being found out."""
    candidates = list(candidates)
    if not candidates:
        return []
    has_root = fresh.path("/") == "/"
    grader = sorted({posixpath.normpath(place) for place in grader_paths})
    grader += [real for real in await _resolve_grader_paths(fresh, grader, live=agent is fresh) if real not in grader]
    resolved = {path: _resolve(carried, path, has_root) for path in candidates}
    outside = {
        found.path
        for found in resolved.values()
        if found.path is not None and not found.is_host_path and not _is_known(carried, found.path)
    }
    same = await _find_identical(outside, grader, agent, fresh, scratch)
    refused = []
    for path, found in resolved.items():
        into = found.path is not None and not found.is_host_path and any(is_below(found.path, one) for one in grader)
        if (
            found.path is None
            or into
            or not (found.is_host_path or _leads_to_known_path(carried, found.path, grader, same))
        ):
            refused.append(RefusedLink(path, str(carried.entries[path]), found.path, into))
    return refused


def _leads_to_known_path(carried: TransferredEntries, path: str, places: list[str], same: set[str]) -> bool:
    if any(is_below(place, path) for place in places):
        return False
    return path in carried.entries if _is_known(carried, path) else path in same


def _is_known(carried: TransferredEntries, path: str) -> bool:
    return path in carried.entries or any(is_below(path, root) for root in carried.roots)


def _resolve(carried: TransferredEntries, link: str, has_root: bool) -> _LinkTarget:
    """The path that a link leads to, with every link on the way that is carried followed."""
    at, steps = posixpath.dirname(link), 0
    ahead = [posixpath.basename(link)]
    while ahead:
        part = ahead.pop()
        if part == "..":
            # Elsewhere the runtime may have links of its own, above which `..` leads to another folder.
            if at == "/" or not (_is_known(carried, at) or is_below(posixpath.dirname(link), at)):
                return _LinkTarget(None)
            at = posixpath.dirname(at)
            continue
        if part in ("", "."):
            continue
        place = posixpath.join(at, part)
        target = carried.entries.get(place)
        if target is None:
            at = place
            continue
        steps += 1
        if steps > _MAX_LINK_STEPS:
            return _LinkTarget(None)
        if target.startswith("/"):
            if not has_root:
                return _LinkTarget(target, is_host_path=True)
            at = "/"
        ahead += reversed(target.split("/"))
    return _LinkTarget(at)


async def _find_identical(
    paths: set[str], places: list[str], agent: Runtime, fresh: Runtime, scratch: Path
) -> set[str]:
    """Those of the paths that lead to the same content in both runtimes, out of the grader's places."""
    if agent is fresh:
        leads = await _resolve_in_runtime(fresh, sorted(paths), agents_doing=True)
        return {path for path, (_, real) in leads.items() if not _overlaps(real, places)}
    left = _MAX_COMPARED_BYTES
    same: dict[str, bool] = {}
    found = set()
    for path, (kind, real) in (await _resolve_in_runtime(fresh, sorted(paths), agents_doing=True)).items():
        if real not in same:
            same[real] = False
            if not _overlaps(real, places) and left > 0 and len(same) <= _MAX_COMPARED_PATHS:
                most = left if kind == "f" else min(left, _MAX_FOLDER_BYTES)
                same[real], size = await _compare(real, most, agent, fresh, scratch)
                left -= size
        if same[real]:
            found.add(path)
    return found


def _overlaps(path: str, places: list[str]) -> bool:
    return any(is_below(path, place) or is_below(place, path) for place in places)


async def _resolve_grader_paths(fresh: Runtime, places: list[str], *, live: bool) -> list[str]:
    """The grader's places with the prepared links on the way to them followed."""
    above = {posixpath.dirname(place) for place in places}
    leads = await _resolve_in_runtime(fresh, sorted(above), agents_doing=live)
    real = ((place, leads.get(posixpath.dirname(place))) for place in places)
    return [posixpath.join(found[1], posixpath.basename(place)) for place, found in real if found is not None]


async def _resolve_in_runtime(fresh: Runtime, paths: list[str], *, agents_doing: bool) -> dict[str, tuple[str, str]]:
    """Where paths lead in a runtime: `f` or `d`, and the real path. Those that lead nowhere are left out.
    `agents_doing`: whatever takes too long, or too much memory, is the agent's (its links, or its programs in a live
    runtime)."""
    asked = [path for path in paths if "\n" not in path]
    if not asked:
        return {}
    with tempfile.NamedTemporaryFile(prefix="links-") as listing:
        stdin = b"".join(os.fsencode(fresh.path(path)) + b"\n" for path in asked)
        done = await fresh.run(
            ["/bin/sh", "-c", _RESOLVE_SCRIPT], stdin=stdin, timeout=_MAX_SECONDS, output=Path(listing.name)
        )
        lines = os.fsdecode(listing.read()).split("\n")
    if done.timed_out or done.out_of_memory:
        how = f"{_MAX_SECONDS:g} seconds" if done.timed_out else "its memory"
        message = f"Where {len(asked)} paths lead could not be found out within {how}."
        raise UngradableWorkError(message) if agents_doing else SandboxError(message)
    if done.exit_code is None:
        raise SandboxError("The grader's runtime was stopped while links were resolved.")
    if done.exit_code != 0 or len(lines) != len(asked) + 1:  # no program for it, or paths of several lines
        return {}
    return await asyncio.to_thread(_to_runtime_paths, fresh.path("/"), dict(zip(asked, lines, strict=False)))


def _to_runtime_paths(root: str, lines: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Real paths as those of the runtime, which may have no root of its own."""
    root = os.path.realpath(root).rstrip("/")
    found = {}
    for path, line in lines.items():
        kind, _, real = line.partition(" ")
        if kind != "-" and (real == root or real.startswith(root + "/")):
            found[path] = kind, real.removeprefix(root) or "/"
    return found


async def _compare(path: str, max_bytes: int, agent: Runtime, fresh: Runtime, scratch: Path) -> tuple[bool, int]:
    """Whether both runtimes have the same there, and how many bytes that took."""
    folder = Path(tempfile.mkdtemp(prefix="links-", dir=scratch))
    try:
        for runtime, name in ((agent, "agent"), (fresh, "fresh")):
            await runtime.get(path, folder / name, max_bytes=max_bytes, all_links=True)
        return await asyncio.to_thread(_is_same, folder / "agent", folder / "fresh")
    except TransferTooLargeError:
        return False, max_bytes
    except OSError:
        return False, 0
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _is_same(one: Path, other: Path) -> tuple[bool, int]:
    if one.is_dir() and other.is_dir():
        size = sum(entry.size for _, entry in list_entries(one, skipped=()))
        return not find_changes(one, other, skipped=()), size
    if one.is_dir() or other.is_dir():
        return False, 0
    return filecmp.cmp(one, other, shallow=False), one.stat().st_size


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is the folder itself, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def escape_path(path: str) -> str:
    """A path as text that can be stored: bytes that are no UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")

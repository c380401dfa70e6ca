"""Decides which of the agent's links may be transferred into the runtime that grades its work.

The grader's files arrive after the agent is done. A link to where they will be would make the grader compare its own
file with itself. So a link is transferred only if the agent could as well have left the content:

- it leads to a file or folder that is transferred with it, or
- it leads to a file or folder of the runtime whose content is the same in the agent's own runtime, such as the
  interpreter of a virtual environment, or
- the task itself made it, at this path and with this target.

No link may lead to, into or above a path of the grader. Links are resolved here, step by step over the list of
transferred entries; only the part of a path that leaves it is resolved by the fresh runtime, before any file of the
agent is there.
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

_MAX_LINK_STEPS = 40  # links on one path, as in the kernel
_MAX_FOLDER_BYTES = 64 << 20
_MAX_COMPARED_BYTES = 1 << 30  # over all links of a session
_MAX_COMPARED_PATHS = 500
_MAX_SECONDS = 60.0  # for one run of the script below

# Resolves each line of standard input in the runtime, and prints `KIND PATH`.
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
    """Entries that are transferred, by absolute path: a link's target, None for files and folders."""

    entries: Mapping[str, str | None]
    roots: frozenset[str]
    """Folders whose complete content is in `entries`."""


class RefusedLink(Struct, frozen=True):
    """A link that is not transferred."""

    path: str
    target: str
    resolved_path: str | None  # None where it could not be resolved
    enters_grader_paths: bool  # it leads to or into a path of the grader

    def to_evidence(self, *, proven: bool) -> Evidence:
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
    """Those of the links at `candidates` that may not be transferred into `fresh`. `grader_paths` are the grader's
    files and folders. Raises UngradableWorkError where the agent's files keep the links from being resolved."""
    candidates = list(candidates)
    if not candidates:
        return []
    has_root = fresh.path("/") == "/"
    grader = sorted({posixpath.normpath(place) for place in grader_paths})
    grader += [real for real in await _resolve_grader_paths(fresh, grader, live=agent is fresh) if real not in grader]
    resolved = {path: _resolve(carried, path, has_root) for path in candidates}
    outside = {
        link_target.path
        for link_target in resolved.values()
        if link_target.path is not None and not link_target.is_host_path and not _is_known(carried, link_target.path)
    }
    identical = await _find_identical(outside, grader, agent, fresh, scratch)
    refused = []
    for path, link_target in resolved.items():
        enters_grader_paths = (
            link_target.path is not None
            and not link_target.is_host_path
            and any(is_below(link_target.path, place) for place in grader)
        )
        if (
            link_target.path is None
            or enters_grader_paths
            or not (link_target.is_host_path or _leads_to_known_path(carried, link_target.path, grader, identical))
        ):
            refused.append(RefusedLink(path, str(carried.entries[path]), link_target.path, enters_grader_paths))
    return refused


def _leads_to_known_path(carried: TransferredEntries, path: str, places: list[str], identical: set[str]) -> bool:
    if any(is_below(place, path) for place in places):
        return False
    return path in carried.entries if _is_known(carried, path) else path in identical


def _is_known(carried: TransferredEntries, path: str) -> bool:
    return path in carried.entries or any(is_below(path, root) for root in carried.roots)


def _resolve(carried: TransferredEntries, link: str, has_root: bool) -> _LinkTarget:
    """The path that a link leads to; follows every transferred link on the way."""
    current, steps = posixpath.dirname(link), 0
    pending = [posixpath.basename(link)]
    while pending:
        part = pending.pop()
        if part == "..":
            # Elsewhere the runtime may have links of its own, above which `..` leads to another folder.
            if current == "/" or not (_is_known(carried, current) or is_below(posixpath.dirname(link), current)):
                return _LinkTarget(None)
            current = posixpath.dirname(current)
            continue
        if part in ("", "."):
            continue
        place = posixpath.join(current, part)
        target = carried.entries.get(place)
        if target is None:
            current = place
            continue
        steps += 1
        if steps > _MAX_LINK_STEPS:
            return _LinkTarget(None)
        if target.startswith("/"):
            if not has_root:
                return _LinkTarget(target, is_host_path=True)
            current = "/"
        pending += reversed(target.split("/"))
    return _LinkTarget(current)


async def _find_identical(
    paths: set[str], places: list[str], agent: Runtime, fresh: Runtime, scratch: Path
) -> set[str]:
    """Those of the paths that lead to the same content in both runtimes, outside of the grader's paths."""
    if agent is fresh:
        leads = await _resolve_in_runtime(fresh, sorted(paths), agents_doing=True)
        return {path for path, (_, real) in leads.items() if not _overlaps(real, places)}
    remaining = _MAX_COMPARED_BYTES
    is_same_by_path: dict[str, bool] = {}
    identical = set()
    for path, (kind, real) in (await _resolve_in_runtime(fresh, sorted(paths), agents_doing=True)).items():
        if real not in is_same_by_path:
            is_same_by_path[real] = False
            if not _overlaps(real, places) and remaining > 0 and len(is_same_by_path) <= _MAX_COMPARED_PATHS:
                max_bytes = remaining if kind == "f" else min(remaining, _MAX_FOLDER_BYTES)
                is_same_by_path[real], size = await _compare(real, max_bytes, agent, fresh, scratch)
                remaining -= size
        if is_same_by_path[real]:
            identical.add(path)
    return identical


def _overlaps(path: str, places: list[str]) -> bool:
    return any(is_below(path, place) or is_below(place, path) for place in places)


async def _resolve_grader_paths(fresh: Runtime, places: list[str], *, live: bool) -> list[str]:
    """The grader's paths with the prepared links on the way resolved."""
    above = {posixpath.dirname(place) for place in places}
    leads = await _resolve_in_runtime(fresh, sorted(above), agents_doing=live)
    real = ((place, leads.get(posixpath.dirname(place))) for place in places)
    return [posixpath.join(resolved[1], posixpath.basename(place)) for place, resolved in real if resolved is not None]


async def _resolve_in_runtime(fresh: Runtime, paths: list[str], *, agents_doing: bool) -> dict[str, tuple[str, str]]:
    """Resolves paths in a runtime: `f` or `d`, and the real path; paths that lead nowhere are omitted. `agents_doing`:
    the agent is to blame if this takes too much time or memory."""
    readable_paths = [path for path in paths if "\n" not in path]
    if not readable_paths:
        return {}
    with tempfile.NamedTemporaryFile(prefix="links-") as listing:
        stdin = b"".join(os.fsencode(fresh.path(path)) + b"\n" for path in readable_paths)
        completed = await fresh.run(
            ["/bin/sh", "-c", _RESOLVE_SCRIPT], stdin=stdin, timeout=_MAX_SECONDS, output=Path(listing.name)
        )
        lines = os.fsdecode(listing.read()).split("\n")
    if completed.timed_out or completed.out_of_memory:
        limit = f"{_MAX_SECONDS:g} seconds" if completed.timed_out else "its memory"
        message = f"Where {len(readable_paths)} paths lead could not be found out within {limit}."
        raise UngradableWorkError(message) if agents_doing else SandboxError(message)
    if completed.exit_code is None:
        raise SandboxError("The grader's runtime was stopped while links were resolved.")
    if (
        completed.exit_code != 0 or len(lines) != len(readable_paths) + 1
    ):  # no program for it, or paths of several lines
        return {}
    return await asyncio.to_thread(_to_runtime_paths, fresh.path("/"), dict(zip(readable_paths, lines, strict=False)))


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

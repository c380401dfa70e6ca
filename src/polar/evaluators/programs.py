"""Programs as the image has them, for a grader that runs among an agent's files.

An agent that owns the whole root can put a program of its own before another in PATH, or in its place. Those that
graders commonly call are put back from a runtime that no agent has been in, and called through a folder that comes
first in PATH; so are the links to where programs and libraries are (/bin, /lib64), and what the machine's own programs
read as they start, where these are mounted read-only and that is not. What this leaves: programs not named here,
libraries that an image has as files of its own, and the packages of an interpreter.
"""

import asyncio
import errno
import secrets
import tempfile
from pathlib import Path

from msgspec import Struct

from polar.evaluators.base import Work
from polar.evaluators.carrying import refused
from polar.runtimes.base import Runtime, SandboxError, TooLarge

NAMES = (
    *("sh", "bash", "env", "timeout", "xargs", "find", "ls", "cat", "cp", "mv", "rm", "mkdir", "chmod", "touch", "tee"),
    *("echo", "printf", "test", "[", "true", "false", "expr", "seq", "date", "sleep", "grep", "sed", "awk", "head"),
    *("tail", "tr", "wc", "cut", "sort", "uniq", "diff", "cmp", "md5sum", "sha256sum", "stat", "readlink", "realpath"),
    *("python", "python3", "pytest", "pip", "pip3", "uv", "uvx", "curl", "wget", "git", "jq", "node", "npm", "npx"),
)
_LARGEST = 256 << 20
_READ_ONLY = {errno.EROFS, errno.EBUSY}  # mounted so: no agent could change it either

# In a shell `test` is its own: `command -v` tells files only from a PATH that is walked.
_WHERE = """
for name; do
    rest=$PATH:
    while [ -n "$rest" ]; do
        file=${rest%%:*}/$name rest=${rest#*:}
        if [ -f "$file" ] && [ -x "$file" ]; then
            printf '%s\\n%s\\n%s\\n' "$name" "$file" "$(readlink -f "$file")"
            break
        fi
    done
done
"""

_LINKS = """
for link; do
    if [ -L "$link" ]; then printf '%s\\n%s\\n' "$link" "$(readlink "$link")"; fi
done
"""
_TOP = "/bin /sbin /lib /lib32 /lib64 /libx32"

# Where the machine's own programs are mounted read-only, these still are not, and lead to what they run: Debian's
# choice between programs of one name; Python's own start, a link from /usr into /etc; where libraries are found.
_CHOSEN = "/etc/alternatives/*"
_STARTS = """
for file in /usr/lib/python3*/sitecustomize.py /usr/lib/python3*/usercustomize.py /etc/ld.so.cache; do
    if [ -L "$file" ] || [ -f "$file" ]; then readlink -f "$file"; fi
done
"""


class Program(Struct, frozen=True):
    name: str
    found: str  # where PATH has it
    real: str  # where links lead from there


async def put_back(work: Work, fresh: Runtime, names: list[str]) -> str:
    """Puts the programs of `fresh` into the agent's runtime; the folder there that has to be the first of PATH."""
    scratch = Path(tempfile.mkdtemp(dir=work.scratch))
    mounted = fresh.spec.image is None
    await _put_links_back(work.agent, fresh, f"{_TOP} {_CHOSEN}" if mounted else _TOP, scratch)
    if mounted:
        await _put_starts_back(work.agent, fresh, scratch)
    found = await _found(fresh, names, scratch / "programs")
    for number, program in enumerate(found):
        here = scratch / str(number)
        try:
            await fresh.get(program.real, here, max_bytes=_LARGEST)
        except (OSError, TooLarge) as error:
            raise SandboxError(f"{program.real} can't be taken from a fresh runtime: {error}.") from error
        for path in {program.real, program.found}:
            await put(work.agent, here, path)
    folder = f"/tmp/polar-{secrets.token_hex(8)}"
    await asyncio.to_thread(_make, scratch / "bin", found)
    await put(work.agent, scratch / "bin", folder)
    return folder


async def _put_links_back(agent: Runtime, fresh: Runtime, paths: str, scratch: Path) -> None:
    """Those of the paths (names and globs) that are links."""
    lines = await _listed(fresh, f"set -- {paths}\n{_LINKS}", [], scratch / "links")
    await asyncio.to_thread(_make_links, scratch / "root", lines)
    await put(agent, scratch / "root", "/")


def _make_links(root: Path, lines: list[str]) -> None:
    root.mkdir()
    for path, target in zip(lines[::2], lines[1::2], strict=True):
        link = root / path.lstrip("/")
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        link.symlink_to(target)


async def _put_starts_back(agent: Runtime, fresh: Runtime, scratch: Path) -> None:
    for number, path in enumerate(await _listed(fresh, _STARTS, [], scratch / "starts")):
        here = scratch / f"start-{number}"
        try:
            await fresh.get(path, here, max_bytes=_LARGEST)
        except FileNotFoundError:  # a link that leads nowhere, until somebody puts a file there
            here.touch()
        await put(agent, here, path)


async def _found(fresh: Runtime, names: list[str], listing: Path) -> list[Program]:
    lines = await _listed(fresh, _WHERE, names, listing)
    return [Program(*lines[at : at + 3]) for at in range(0, len(lines) - 2, 3)]


async def _listed(fresh: Runtime, script: str, arguments: list[str], listing: Path) -> list[str]:
    done = await fresh.run(["/bin/sh", "-c", script, "sh", *arguments], output=listing)
    if done.exit_code != 0:
        raise SandboxError(f"The programs of a fresh runtime can't be listed: {done.exit_code}.")
    return (await asyncio.to_thread(listing.read_text)).splitlines()


async def put(runtime: Runtime, source: Path | bytes, path: str) -> None:
    """Wherever links on the way to it lead now, it is found there. Raises NotTaken where the agent left no room."""
    try:
        await runtime.put(source, path)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise refused(runtime, path, error) from error


def _make(folder: Path, programs: list[Program]) -> None:
    """Scripts that call the program where it is: some look for their files beside themselves."""
    folder.mkdir()
    folder.chmod(0o755)
    for program in programs:
        script = folder / program.name
        script.write_text(f"#!/bin/sh\nexec '{program.found}' \"$@\"\n")
        script.chmod(0o755)

"""A trial of a kind of runtime: one is made, used and removed, as the current user."""

import asyncio
import contextlib
import secrets
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from polar.runtimes.base import Limits, RuntimeBackend, RuntimeSpec, SandboxError
from polar.runtimes.container_cli import ContainerCli

TRIAL_SECONDS = 60.0
_IMAGE_PROGRAMS = ("sh", "env", "sleep", "cat")
_IMAGE_FOLDERS = ("dev", "etc", "proc", "sys", "tmp")
_DISK_MB = 64
_PROBE_CONTENT = b"It works."


async def run_trial(backend: RuntimeBackend, seconds: float = TRIAL_SECONDS) -> str | None:
    """Why no runtime of this kind can be made and used here; None where one was. Leaves nothing behind."""
    if (why := await backend.check_availability()) is not None:
        return why
    try:
        async with asyncio.timeout(seconds), backend.trial_image() as image:
            await _use_runtime(backend, image)
    except TimeoutError:
        return f"A runtime could not be made, used and removed within {seconds:g} seconds."
    except (SandboxError, OSError) as error:
        return str(error)
    return None


async def _use_runtime(backend: RuntimeBackend, image: str | None) -> None:
    await backend.prepare(image)
    runtime = await backend.create(
        f"trial-{secrets.token_hex(6)}", RuntimeSpec(image=image, limits=Limits(disk_mb=_DISK_MB))
    )
    try:
        await runtime.start()
        await runtime.put(_PROBE_CONTENT, "/workspace/said")
        completed = await runtime.run(["cat", runtime.path("/workspace/said")])
        if completed.exit_code != 0:
            raise SandboxError(f"A command in the runtime ended with {completed.exit_code}.")
    finally:
        await runtime.remove()


@contextlib.asynccontextmanager
async def build_trial_image(cli: ContainerCli) -> AsyncIterator[str]:
    """An image of this machine's shell and three programs, which no registry is asked for. It is removed again."""
    name = f"localhost/polar-trial:{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "root.tar")
        await asyncio.to_thread(_pack_root, packed)
        await cli.call("import", str(packed), name)
    try:
        yield name
    finally:
        await cli.call("image", "rm", name)


def _pack_root(target: Path) -> None:
    programs = {name: Path(found).resolve() for name in _IMAGE_PROGRAMS if (found := shutil.which(name))}
    with tarfile.open(target, "w", dereference=True) as tar:
        for name in _IMAGE_FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for library in sorted(set().union(*map(_find_libraries, programs.values()))):
            tar.add(library, library.lstrip("/"))
        for name, program in programs.items():
            tar.add(program, f"bin/{name}")


def _find_libraries(program: Path) -> set[str]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return {word for word in listed.split() if word.startswith("/")}

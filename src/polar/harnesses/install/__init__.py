"""Installs harnesses into the cache (see `harnesses.cache`), with npm and pip as the user has them set up.

    lock -> build in a folder beside -> bring the libraries that an image may lack -> run it -> seal -> rename

What is killed on the way leaves a folder that the next installation removes.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from polar.errors import ConfigError
from polar.harnesses import cache as caches
from polar.harnesses.base import Harness, Package
from polar.harnesses.cache import Installation, Marker
from polar.harnesses.install import npm, pypi
from polar.harnesses.install.libraries import bundle_libraries
from polar.harnesses.install.tools import InstallError, InstallTools, Progress, keep_last_lines
from polar.runtimes.state_folder import remove_tree

_CHECK_SECONDS = 300.0


async def install(
    harness: Harness, version: str | None, cache: Path, progress: Progress, python: str | None = None
) -> Installation:
    """A harness in the cache, in the preset's own version where none is named; `latest` is the registry's newest.
    Nothing is done where it is there and whole. `cache` is absolute, without links (`cache_folder`); `python` is the
    interpreter for harnesses from PyPI."""
    package = harness.package
    if package is None:
        raise ConfigError(f"{harness.name} needs no installation.")
    if sys.platform != "linux":
        raise InstallError("Harnesses are installed for Linux, on Linux.")
    target_version = version or package.version
    if not caches.is_version(target_version):
        raise ConfigError(f"{target_version!r} is not a version of {harness.name}.")
    tools = InstallTools(cache, progress)
    async with tools.hold_lock(harness.name):
        home = cache / harness.name
        if (there := await _find_undamaged(home / target_version)) is not None:
            return there
        async with tools.make_build_folder(home) as folder:
            installed_version = await _build(harness.name, package, target_version, folder, tools, python)
            if (there := await _find_undamaged(home / installed_version)) is not None:
                return there
            return await asyncio.to_thread(_move_into_place, folder, home / installed_version)


async def remove(cache: Path, name: str, version: str | None, progress: Progress) -> list[str]:
    """Removes a harness, or one version of it, damaged or not; the versions that went."""
    async with InstallTools(cache, progress).hold_lock(name):
        folders = [folder for folder in (cache / name).glob("[!.]*") if version in (None, folder.name)]
        for folder in folders:
            (folder / caches.MARKER_FILE).unlink(missing_ok=True)  # from here on it is none
            await asyncio.to_thread(remove_tree, folder)
        return sorted(folder.name for folder in folders)


async def _build(
    name: str, package: Package, version: str, folder: Path, tools: InstallTools, python: str | None
) -> str:
    """Its version, which `latest` doesn't tell."""
    if package.registry == "npm":
        version = await npm.build(package, version, folder, tools)
    else:
        version = await pypi.build(package, version, folder, tools, python)
    tools.progress("bringing the libraries it needs")
    await bundle_libraries(folder, tools)
    tools.progress(f"running {package.executable} --help")
    await _check(folder / "bin" / package.executable, tools)
    marker = Marker(name, version, package.name, package.executable, bytes=0)
    await asyncio.to_thread(caches.seal, folder, marker)
    await asyncio.to_thread(_make_world_readable, folder)
    return version


async def _check(program: Path, tools: InstallTools) -> None:
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "LANG": "C.UTF-8"}
        code, output = await tools.run([str(program), "--help"], cwd=Path(home), env=env, timeout=_CHECK_SECONDS)
    if code != 0:
        raise InstallError(f"It was installed, but does not run here (exit code {code}): {keep_last_lines(output)}")


def _make_world_readable(folder: Path) -> None:
    """The users of images are others than ours."""
    folder.chmod(0o755)
    for above, folders, files in os.walk(folder):
        for path in (Path(above, name) for name in (*folders, *files)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def _move_into_place(building: Path, folder: Path) -> Installation:
    if folder.exists():  # and is damaged
        folder.rename(building.with_name(f"{building.name}-old"))  # removed with what else is left of building
    building.rename(folder)
    made = caches.read_installation(folder)
    assert made is not None
    return made


async def _find_undamaged(folder: Path) -> Installation | None:
    there = caches.read_installation(folder)
    return there if there is not None and await asyncio.to_thread(caches.find_damage, there) is None else None

"""A harness from npm, with a Node of its own.

FOLDER/node_modules/...    the package, and what it needs
FOLDER/node/bin/node       a hard link to the cache's Node; not there where the harness is a program of its own
FOLDER/bin/EXECUTABLE
"""

import asyncio
import json
import os
import platform
import shlex
import shutil
from pathlib import Path

from polar.harnesses.base import Package
from polar.harnesses.install.libraries import set_search_path
from polar.harnesses.install.tools import InstallError, InstallTools, write_wrapper

NODE_VERSION = "22.23.3"
_NODE_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
_QUIET = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", "--no-progress")


async def build(package: Package, version: str, folder: Path, tools: InstallTools) -> str:
    """The version that was installed."""
    node = await _ensure_node(tools)
    # npm runs on that Node as well: under an older one it leaves out what doesn't suit it, without a word.
    env = os.environ | {"PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    packages = [f"{package.name}@{version}", *package.extra_packages]
    tools.progress(f"npm install {' '.join(packages)}")
    await _run_npm_install(tools, folder, packages, env)
    await asyncio.to_thread(_write_start, folder, package, node)
    installed_version: str = json.loads((folder / "node_modules" / package.name / "package.json").read_bytes())[
        "version"
    ]
    return installed_version


def _write_start(folder: Path, package: Package, node: Path) -> None:
    entry = folder / "node_modules" / ".bin" / package.executable
    if not entry.exists():
        raise InstallError(f"{package.name} brings no command {package.executable}.")
    program = os.path.relpath(entry.resolve(), folder.resolve())
    with entry.open("rb") as file:
        first = file.readline(256)
    if not first.startswith(b"#!"):
        write_wrapper(folder, package.executable, program)
        return
    (folder / "node" / "bin").mkdir(parents=True)
    _link(node, folder / "node" / "bin" / "node")
    write_wrapper(folder, package.executable, "node/bin/node", _parse_node_options(first.decode()), program)


async def _run_npm_install(
    tools: InstallTools, folder: Path, packages: list[str], env: dict[str, str] | None = None
) -> None:
    if (npm := shutil.which("npm")) is None:
        raise InstallError("npm is not on PATH: install Node (which brings it) and try again.")
    (folder / "package.json").write_text('{"private": true}\n')  # else npm looks for one in the folders above
    await tools.run_checked([npm, "install", "--prefix", str(folder), *_QUIET, *packages], cwd=folder, env=env)


async def _ensure_node(tools: InstallTools) -> Path:
    """The Node of the cache."""
    machine = platform.machine()
    if machine not in _NODE_ARCHITECTURES:
        raise InstallError(f"npm has no Node for machines of the kind {machine}.")
    name = f"node-linux-{_NODE_ARCHITECTURES[machine]}"

    async def make(folder: Path) -> Path:
        await _run_npm_install(tools, folder, [f"{name}@{NODE_VERSION}"])
        made = folder / "node_modules" / name
        await set_search_path(made / "bin" / "node", "$ORIGIN/../../lib", tools)  # as it will be linked to
        return made

    return await tools.ensure_cached("node", NODE_VERSION, make) / "bin" / "node"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _parse_node_options(shebang: str) -> list[str]:
    """Those that a script wants Node to have: `#!/usr/bin/env -S node --no-warnings`."""
    words = shlex.split(shebang[2:])
    names = [os.path.basename(word) for word in words]
    if "node" not in names:
        raise InstallError(f"The harness is a script for something else than Node: {shebang.strip()}.")
    return words[names.index("node") + 1 :]

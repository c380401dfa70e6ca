"""A harness from PyPI, with a Python of its own.

    FOLDER/python/bin/python3.X        a copy of an interpreter of this machine
    FOLDER/python/lib/python3.X/...    its library, with the package and what it needs in site-packages
    FOLDER/start/EXECUTABLE            calls the package's entry point
    FOLDER/bin/EXECUTABLE              or `python` itself, for packages that scripts are written with

Python finds its library by where it lies, so no variable needs to say so. It runs isolated (-I): the variables and the
files that a task has for its own Python don't reach the harness.
"""

import asyncio
import os
import re
import shutil
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.harnesses.base import Package
from polar.harnesses.install.tools import PIP_INSTALL, InstallError, InstallTools, write_wrapper

_IGNORE_UNUSED = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"),
    *("config-*", "sitecustomize.py", "EXTERNALLY-MANAGED", "_tkinter.*", "_test*.so", "_ctypes_test.*", "nis.*"),
)
_ISOLATED_OPTIONS = ("-I", "-B")  # and writing nothing into the installation
_PROBE_CODE = """\
import json, os, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "program": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "prefix": os.path.realpath(sys.base_prefix),
    "stdlib": os.path.realpath(sysconfig.get_path("stdlib")),
}))
"""
# Some distributions' Python looks in other folders.
_SITECUSTOMIZE_CODE = """\
import os, site, sys
_packages = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages")
if _packages not in sys.path:
    site.addsitedir(_packages)
"""
_START_SCRIPT = """\
import sys

from {module} import {first}

if __name__ == "__main__":
    sys.exit({attribute}())
"""


class Interpreter(Struct, frozen=True):
    version: tuple[int, int, int]
    program: str
    prefix: str
    stdlib: str
    called: str = ""  # as it was found: where it is an environment's, this one may have pip where its base has none

    @property
    def spelled(self) -> str:
        return ".".join(map(str, self.version))


async def build(package: Package, version: str, folder: Path, tools: InstallTools, python: str | None) -> str:
    """The version that was installed."""
    interpreter = await _find_interpreter(package, tools, python)
    tools.progress(f"copying Python {interpreter.spelled}")
    own, library = await asyncio.to_thread(_copy, interpreter, folder)
    requirements = [package.name if version == "latest" else f"{package.name}=={version}", *package.extra_packages]
    tools.progress(f"pip install {' '.join(requirements)}")
    packages = library / "site-packages"
    pip = await _find_pip(interpreter, tools)
    await tools.run_checked([*pip, *PIP_INSTALL, "--no-compile", "--target", str(packages), *requirements])
    shutil.rmtree(packages / "bin", ignore_errors=True)  # these name the interpreter that installed them
    tools.progress("compiling")
    # Some packages have files for other versions of Python, which don't compile.
    await tools.run([str(own), "-I", "-m", "compileall", "-q", str(library)])
    distribution = _find_distribution(packages, package.name)
    _write_start(folder, distribution, package.executable, str(own.relative_to(folder)))
    return distribution.version


def _write_start(folder: Path, distribution: Distribution, executable: str, python: str) -> None:
    if executable == "python":  # it is a library, for scripts
        write_wrapper(folder, executable, python, _ISOLATED_OPTIONS)
        return
    entry = next((one for one in distribution.entry_points if one.name == executable), None)
    if entry is None or entry.group != "console_scripts":
        raise InstallError(f"{distribution.name} {distribution.version} brings no command {executable}.")
    start = folder / "start" / executable
    start.parent.mkdir()
    start.write_text(_START_SCRIPT.format(module=entry.module, first=entry.attr.split(".")[0], attribute=entry.attr))
    write_wrapper(folder, executable, python, _ISOLATED_OPTIONS, f"start/{executable}")


def _find_distribution(packages: Path, name: str) -> Distribution:
    def plain(text: str) -> str:
        return re.sub(r"[-_.]+", "-", text).lower()

    return next(one for one in distributions(path=[str(packages)]) if plain(one.name) == plain(name))


def _copy(interpreter: Interpreter, folder: Path) -> tuple[Path, Path]:
    """The copied program, and its library."""
    python = folder / "python"
    program = python / "bin" / "python{}.{}".format(*interpreter.version)
    program.parent.mkdir(parents=True)
    shutil.copy(interpreter.program, program)
    library = python / os.path.relpath(interpreter.stdlib, interpreter.prefix)
    shutil.copytree(interpreter.stdlib, library, ignore=_IGNORE_UNUSED, ignore_dangling_symlinks=True)
    (library / "site-packages").mkdir()
    (library / "sitecustomize.py").write_text(_SITECUSTOMIZE_CODE)
    return program, library


async def _find_pip(interpreter: Interpreter, tools: InstallTools) -> list[str]:
    for python in (interpreter.called, interpreter.program):
        if (await tools.run([python, "-m", "pip", "--version"]))[0] == 0:
            return [python, "-m", "pip"]
    raise InstallError(f"{interpreter.called} has no pip: install it, or name another Python with --python.")


async def _find_interpreter(package: Package, tools: InstallTools, python: str | None) -> Interpreter:
    """The one that is asked for; else ours; else the oldest on PATH that suits the package."""
    for called in [python] if python else [sys.executable, *_list_interpreters_on_path()]:
        interpreter = await _probe(called, tools)
        if interpreter is None and python:
            raise InstallError(f"{called} is no Python that runs here.")
        if interpreter is not None and _satisfies(interpreter.version, package.requires_python):
            return interpreter
    here = f"{python} is another one" if python else "neither this one nor any python3.X on PATH is one"
    needed = f"{package.requires_python} or newer" if package.requires_python[:1].isdigit() else package.requires_python
    raise InstallError(f"{package.name} needs Python {needed}, and {here}: install one, or name it with --python PATH.")


def _list_interpreters_on_path() -> list[str]:
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = {path.name: path for folder in reversed(folders) if folder for path in Path(folder).glob("python3.*")}
    minors = {int(match[1]): path for name, path in found.items() if (match := re.fullmatch(r"python3\.(\d+)", name))}
    return [str(minors[minor]) for minor in sorted(minors)]


async def _probe(called: str, tools: InstallTools) -> Interpreter | None:
    try:
        code, output = await tools.run([called, "-I", "-c", _PROBE_CODE])
    except InstallError:
        return None
    if code != 0:  # such as a shim for one that isn't chosen
        return None
    return msgspec.structs.replace(msgspec.json.decode(output, type=Interpreter), called=called)


def _satisfies(version: tuple[int, int, int], specifier: str) -> bool:
    """`wanted` is an oldest version, `3.12`, or bounds, `>=3.10,<3.13`."""
    for bound in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.fullmatch(r"(>=|<)?\s*(\d+(?:\.\d+)*)", bound)
        if match is None:
            raise InstallError(f"{specifier!r} does not say which Python is needed: write `3.12`, or `>=3.10,<3.13`.")
        limit = tuple(map(int, match[2].split(".")))
        if (version < limit) != (match[1] == "<"):
            return False
    return True

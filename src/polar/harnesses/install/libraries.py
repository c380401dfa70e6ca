"""Shared libraries of this machine that an image may lack, brought along in FOLDER/lib.

A program finds them by a search path of its own (DT_RPATH), relative to where it lies: it holds for whatever the
program loads, and for nothing that it starts, unlike LD_LIBRARY_PATH. The C library is the image's; two of them can't
be mixed.
"""

import asyncio
import os
import re
import shutil
import struct
from pathlib import Path

from polar.harnesses.install.tools import InstallTools

_C_LIBRARY = re.compile(
    r"(linux-vdso|ld-linux.*|lib(c|m|mvec|dl|pthread|rt|util|resolv|anl|nss_.*|BrokenLocale|thread_db))\.so(\.|$)"
)
_LDD_LINE_PATTERN = re.compile(r"\t(\S+) => (/.+) \(0x[0-9a-f]+\)")
_LDD_BATCH_SIZE = 200  # files, in one call of ldd
_PT_INTERP, _PT_DYNAMIC = 3, 2  # kinds of program headers
_DT_RUNPATH = 29


async def bundle_libraries(folder: Path, tools: InstallTools) -> None:
    """For every program and library in a folder. One that has a search path of its own (DT_RUNPATH) gets ours besides,
    since it doesn't look at that of the program."""
    binaries = await asyncio.to_thread(_find_binaries, folder)
    lib = folder / "lib"
    for path, needed in (await _list_needed(list(binaries), tools)).items():
        missing = {name: real for name, real in needed.items() if not Path(real).is_relative_to(folder)}
        if missing:
            await asyncio.to_thread(_copy, missing, lib)
            if any(binaries[path]):
                await set_search_path(path, _build_search_path(path, lib), tools)
    for path, header in (await asyncio.to_thread(_find_binaries, lib)).items():
        if any(header):
            await set_search_path(path, "$ORIGIN", tools)


async def set_search_path(binary: Path, path: str, tools: InstallTools) -> None:
    """Adds to where a binary looks for libraries. One that looks there already is left as it is: it may be linked to
    from elsewhere."""
    patchelf = await tools.ensure_patchelf()
    current = (await tools.run_checked([patchelf, "--print-rpath", str(binary)])).strip()
    if path in current.split(":"):
        return
    relative_parts = [
        part for part in current.split(":") if part.startswith("$ORIGIN")
    ]  # others are places on this machine
    await tools.run_checked([patchelf, "--force-rpath", "--set-rpath", ":".join([*relative_parts, path]), str(binary)])


async def _list_needed(binaries: list[Path], tools: InstallTools) -> dict[Path, dict[str, str]]:
    """By binary: the libraries that it loads, and where they are; those of the C library left out."""
    needs: dict[Path, dict[str, str]] = {path: {} for path in binaries}
    for start in range(0, len(binaries), _LDD_BATCH_SIZE):
        batch = binaries[start : start + _LDD_BATCH_SIZE]
        # ldd fails where one of them is not for this machine, or static; then it finds nothing for it.
        _, output = await tools.run(["ldd", *map(str, batch)])
        current = batch[0]
        for line in output.splitlines():
            if line.endswith(":") and line.startswith("/"):
                current = Path(line[:-1])
            elif (found := _LDD_LINE_PATTERN.match(line)) and not _C_LIBRARY.match(found[1]):
                needs[current][found[1]] = found[2]
    return needs


def _copy(libraries: dict[str, str], lib: Path) -> None:
    lib.mkdir(exist_ok=True)
    for name, real in libraries.items():
        target = lib / os.path.basename(name)
        if not target.exists():
            shutil.copy(real, target)
            target.chmod(0o755)


def _build_search_path(binary: Path, lib: Path) -> str:
    return "$ORIGIN/" + os.path.relpath(lib, binary.parent)


def _find_binaries(folder: Path) -> dict[Path, tuple[bool, bool]]:
    files = (Path(above, name) for above, _, names in os.walk(folder) for name in names)
    return {
        path: header
        for path in files
        if not path.is_symlink() and path.is_file() and (header := _read_elf_header(path)) is not None
    }


def _read_elf_header(path: Path) -> tuple[bool, bool] | None:
    """Of a binary for Linux: whether it is a program, and whether it has a DT_RUNPATH. None for any other file."""
    with path.open("rb") as file:
        start = file.read(64)
        if len(start) < 64 or start[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return None
        at, size, count = struct.unpack_from("<Q14xHH", start, 32)
        file.seek(at)
        headers = file.read(size * count)
        is_program = has_runpath = False
        for start_of in range(0, len(headers), size):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", headers, start_of)
            is_program |= kind == _PT_INTERP
            if kind == _PT_DYNAMIC:
                file.seek(offset)
                tags = file.read(length)
                has_runpath |= any(
                    tag == _DT_RUNPATH for tag, _ in struct.iter_unpack("<qQ", tags[: length // 16 * 16])
                )
        return is_program, has_runpath

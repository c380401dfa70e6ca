"""Files that are there whole or not at all, whenever the process, or the machine, ends."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def create_folder_atomically(path: Path) -> Iterator[Path]:
    """A folder to be filled, which takes its name when all that is in it is on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    for file in sorted(unfinished.iterdir()):
        fsync_path(file)
    fsync_path(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    fsync_path(path.parent)


def write_file_atomically(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(data)
    fsync_path(unfinished)
    unfinished.rename(path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

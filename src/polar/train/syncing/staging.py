"""Weights as files, for engines on the same machine: in memory where there is room, else in the run's own folder.

The latest ones stay while the run goes on, so that an engine that is started again finds them. In memory those before
them stay as well, as a spare file: the next ones overwrite it, since memory that is had takes a fraction of the time of
memory that has to be found.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from polar.engines.embedded.weights import Update, remember, remembered
from polar.errors import ConfigError

log = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_FILE, _SPARE = "model.safetensors", "spare"

_Kinds = dict[str, tuple[torch.dtype, torch.Size]]


def size_of(weights: Mapping[str, Tensor]) -> int:
    """In bytes, as a file has them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


# The places of a run that keeps its own things in the folder `run`


def staging_folder(run: Path, size: int) -> Path:
    """For weights of so many bytes. New ones are written beside those that engines have, so in memory there must be
    more than twice the room: containers often have a mere 64 MB there."""
    memory = _in_memory(run)
    if os.access(_MEMORY, os.W_OK):
        own = sum(file.stat().st_size for file in memory.rglob("*") if file.is_file())
        if shutil.disk_usage(_MEMORY).free + own > 2 * size:
            return memory
    return _on_disk(run)


def clear_others(run: Path, folder: Path) -> None:
    """Weights lie in `folder` now. What an earlier process of the run put elsewhere is not needed any longer."""
    for place in (_in_memory(run), _on_disk(run)):
        if place != folder:
            shutil.rmtree(place, ignore_errors=True)


def clear(run: Path) -> None:
    """Nobody goes on from here, so an engine that is started again needs no weights."""
    for place in (_in_memory(run), _on_disk(run)):
        shutil.rmtree(place, ignore_errors=True)


def put_away(run: Path, state: Path | None) -> None:
    """The run may be gone on with, but its processes have ended: what lies in memory would stay there until the machine
    is started anew. So the weights that the engine remembers in the file `state` move to the run's folder; others are
    not needed, since the trainer gives engines those of its checkpoint."""
    memory, disk = _in_memory(run), Staging(_on_disk(run))
    last = None if state is None else remembered(state)
    if state is not None and last is not None and Path(last.path).is_relative_to(memory) and Path(last.path).exists():
        try:
            disk.take(Path(last.path), last.version)
            remember(state, Update(str(disk.file(last.version)), last.version))
            disk.keep_only(last.version)
        except OSError as error:
            log.warning("The latest weights stay in %s: %s can't have them: %s", memory, disk.folder, error)
            return
    shutil.rmtree(memory, ignore_errors=True)


def _in_memory(run: Path) -> Path:
    """The same one each time that it is asked for."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return (_MEMORY / f"polar-weights-{os.getuid()}-{name}").resolve()


def _on_disk(run: Path) -> Path:
    return run.resolve() / "weights"


class Staging:
    """One folder a version, each with a file of weights as a Hugging Face checkpoint has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._kinds: dict[str, _Kinds] = {}  # by folder, what this process has written there

    def of(self, version: int) -> Path:
        return self.folder / str(version)

    def file(self, version: int) -> Path:
        return self.of(version) / _FILE

    def write(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whole, or not at all."""
        unfinished = self._unfinished(version)
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self.folder.glob(self._unfinished("*").name):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            if self._kinds.pop(_SPARE, None) == kinds and self._spare.exists():  # memory is cleared by others, too
                self._spare.rename(unfinished)
                _overwrite(unfinished / _FILE, weights)
            else:
                self._write_new(weights, unfinished)
            self._finish(version)
        except (OSError, SafetensorError) as error:  # the latter, with the system's words, where the disk is full
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"The weights can't be written to {self.folder}: {reason}.") from error
        self._kinds[str(version)] = kinds

    def _write_new(self, weights: Mapping[str, Tensor], unfinished: Path) -> None:
        shutil.rmtree(self._spare, ignore_errors=True)  # of other weights, or an earlier process
        size = size_of(weights)
        if shutil.disk_usage(self.folder).free < size:
            raise ConfigError(
                f"The weights take {size / 1e6:.0f} MB, and {self.folder} has no room for them: "
                "free some, or choose another output folder."
            )
        unfinished.mkdir()
        save_file(_apart(weights), unfinished / _FILE, metadata={"format": "pt"})

    def take(self, file: Path, version: int) -> None:
        """A file of weights that lies somewhere else: whole, or not at all. Raises OSError."""
        unfinished = self._unfinished(version)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(mode=0o700, parents=True)
            shutil.copyfile(file, unfinished / _FILE)
            self._finish(version)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _unfinished(self, version: int | str) -> Path:
        return self.folder / f"{version}.unfinished"

    def _finish(self, version: int) -> None:
        shutil.rmtree(self.of(version), ignore_errors=True)  # of an update that failed
        self._unfinished(version).rename(self.of(version))

    def keep_only(self, version: int) -> None:
        """All engines have this one, so nobody reads those before it."""
        for folder in self.folder.iterdir():
            if folder.name in (str(version), _SPARE):
                continue
            kinds = self._kinds.pop(folder.name, None)
            if kinds and _SPARE not in self._kinds and self.folder.is_relative_to(_MEMORY.resolve()):
                folder.rename(self._spare)
                self._kinds[_SPARE] = kinds
            else:
                shutil.rmtree(folder, ignore_errors=True)

    def drop_spare(self) -> None:
        self._kinds.pop(_SPARE, None)
        shutil.rmtree(self._spare, ignore_errors=True)

    @property
    def _spare(self) -> Path:
        return self.folder / _SPARE


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors as tensors of their own: the file's format knows no others."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        tensor = tensor.detach().to("cpu").contiguous()
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart


class _Place(Struct):
    """Of a tensor in a file: from where to where, behind the header."""

    data_offsets: tuple[int, int]


def _overwrite(file: Path, weights: Mapping[str, Tensor]) -> None:
    """The file holds tensors of the same names and kinds."""
    data = np.memmap(file, np.uint8, "r+")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = msgspec.json.decode(data[8:begin].tobytes(), type=dict[str, msgspec.Raw])
    for name, tensor in weights.items():
        low, high = msgspec.json.decode(header[name], type=_Place).data_offsets
        place = torch.from_numpy(data[begin + low : begin + high])
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

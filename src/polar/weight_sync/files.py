"""Weights as files, for engines on the same machine: in shared memory if there is room, else in the run's folder.
Polar's embedded engine and vLLM (`vllm.py`) read them.

The latest weights stay during the run, so that a restarted engine finds them. In shared memory the previous file stays
as a spare, which the next update overwrites: reusing pages is much faster than allocating them.
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

from polar.engines.embedded.weights import WeightUpdate, load_update, save_update
from polar.engines.http_client import EngineHttpClient
from polar.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_WEIGHTS_FILE, _SPARE_FOLDER = "model.safetensors", "spare"
LOAD_SECONDS = 600.0
"""The time limit for an engine to read its weights."""

_TensorSpecs = dict[str, tuple[torch.dtype, torch.Size]]


def count_weight_bytes(weights: Mapping[str, Tensor]) -> int:
    """The size of the weights' file, without its header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


# The staging folders of a run, whose output folder is `run`


def choose_staging_folder(run: Path, size: int) -> Path:
    """Chooses where to stage weights of `size` bytes. New weights are written beside the current ones, so shared memory
    needs more than twice the room; containers often have only 64 MB there."""
    memory = _get_memory_folder(run)
    if os.access(_SHARED_MEMORY, os.W_OK):
        staged_bytes = sum(file.stat().st_size for file in memory.rglob("*") if file.is_file())
        if shutil.disk_usage(_SHARED_MEMORY).free + staged_bytes > 2 * size:
            return memory
    return _get_disk_folder(run)


def remove_other_stagings(run: Path, folder: Path) -> None:
    """Removes weights that an earlier process of the run staged outside `folder`."""
    for candidate in (_get_memory_folder(run), _get_disk_folder(run)):
        if candidate != folder:
            shutil.rmtree(candidate, ignore_errors=True)


def remove_staged_weights(run: Path) -> None:
    """Removes all staged weights of a run that will not be resumed."""
    for staging in (_get_memory_folder(run), _get_disk_folder(run)):
        shutil.rmtree(staging, ignore_errors=True)


def move_weights_to_disk(run: Path, state: Path | None) -> None:
    """Moves the weights that the engine's state file names from shared memory to the run's folder, after the run's
    processes ended. They would otherwise stay in memory until the machine restarts. Other weights are removed: a
    resumed trainer sends engines those of its checkpoint."""
    memory, disk = _get_memory_folder(run), WeightStaging(_get_disk_folder(run))
    last_update = None if state is None else load_update(state)
    if (
        state is not None
        and last_update is not None
        and Path(last_update.path).is_relative_to(memory)
        and Path(last_update.path).exists()
    ):
        try:
            disk.copy_from(Path(last_update.path), last_update.version)
            save_update(state, WeightUpdate(str(disk.get_weights_file(last_update.version)), last_update.version))
            disk.keep_only(last_update.version)
        except OSError as error:
            log.warning(
                "The latest weights stay in %s, because they can't be copied to %s: %s", memory, disk.folder, error
            )
            return
    shutil.rmtree(memory, ignore_errors=True)


def _get_memory_folder(run: Path) -> Path:
    """The run's folder in shared memory, the same in every process."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return (_SHARED_MEMORY / f"polar-weights-{os.getuid()}-{name}").resolve()


def _get_disk_folder(run: Path) -> Path:
    return run.resolve() / "weights"


class WeightStaging:
    """One folder per version, each with a weights file in the format of a Hugging Face checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._specs_by_folder: dict[str, _TensorSpecs] = {}  # by folder, the tensors that this process wrote there

    def get_version_folder(self, version: int) -> Path:
        return self.folder / str(version)

    def get_weights_file(self, version: int) -> Path:
        return self.get_version_folder(version) / _WEIGHTS_FILE

    def write(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Writes a version atomically. Raises ConfigError."""
        unfinished = self._get_unfinished_folder(version)
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for abandoned in self.folder.glob(self._get_unfinished_folder("*").name):  # of a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            if (
                self._specs_by_folder.pop(_SPARE_FOLDER, None) == specs and self._spare.exists()
            ):  # memory is cleared by others, too
                self._spare.rename(unfinished)
                _overwrite(unfinished / _WEIGHTS_FILE, weights)
            else:
                self._write_new(weights, unfinished)
            self._rename_finished(version)
        except (OSError, SafetensorError) as error:  # safetensors raises its own error when the disk is full
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"The weights can't be written to {self.folder}: {reason}.") from error
        self._specs_by_folder[str(version)] = specs

    def _write_new(self, weights: Mapping[str, Tensor], unfinished: Path) -> None:
        shutil.rmtree(self._spare, ignore_errors=True)  # of another model or an earlier process
        size = count_weight_bytes(weights)
        if shutil.disk_usage(self.folder).free < size:
            raise ConfigError(
                f"The weights take {size / 1e6:.0f} MB, and {self.folder} has no room for them: "
                "free some, or choose another output folder."
            )
        unfinished.mkdir()
        save_file(_untie_weights(weights), unfinished / _WEIGHTS_FILE, metadata={"format": "pt"})

    def copy_from(self, file: Path, version: int) -> None:
        """Copies a weights file from elsewhere atomically. Raises OSError."""
        unfinished = self._get_unfinished_folder(version)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(mode=0o700, parents=True)
            shutil.copyfile(file, unfinished / _WEIGHTS_FILE)
            self._rename_finished(version)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _get_unfinished_folder(self, version: int | str) -> Path:
        return self.folder / f"{version}.unfinished"

    def _rename_finished(self, version: int) -> None:
        shutil.rmtree(self.get_version_folder(version), ignore_errors=True)  # of an update that failed
        self._get_unfinished_folder(version).rename(self.get_version_folder(version))

    def keep_only(self, version: int) -> None:
        """Removes other versions once all engines have loaded this one. One of them may become the spare."""
        for folder in self.folder.iterdir():
            if folder.name in (str(version), _SPARE_FOLDER):
                continue
            specs = self._specs_by_folder.pop(folder.name, None)
            if (
                specs
                and _SPARE_FOLDER not in self._specs_by_folder
                and self.folder.is_relative_to(_SHARED_MEMORY.resolve())
            ):
                folder.rename(self._spare)
                self._specs_by_folder[_SPARE_FOLDER] = specs
            else:
                shutil.rmtree(folder, ignore_errors=True)

    def drop_spare(self) -> None:
        self._specs_by_folder.pop(_SPARE_FOLDER, None)
        shutil.rmtree(self._spare, ignore_errors=True)

    @property
    def _spare(self) -> Path:
        return self.folder / _SPARE_FOLDER


def _untie_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tied tensors, since the file format does not support shared storage."""
    untied: dict[str, Tensor] = {}
    seen_storages: set[int] = set()
    for name, tensor in weights.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        untied[name] = tensor.clone() if storage in seen_storages else tensor
        seen_storages.add(storage)
    return untied


class _TensorHeader(Struct):
    """A tensor's byte range in a file, counted from the end of the header."""

    data_offsets: tuple[int, int]


def _overwrite(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Overwrites a file that has tensors of the same names, types and shapes."""
    data = np.memmap(file, np.uint8, "r+")
    data_start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = msgspec.json.decode(data[8:data_start].tobytes(), type=dict[str, msgspec.Raw])
    for name, tensor in weights.items():
        low, high = msgspec.json.decode(header[name], type=_TensorHeader).data_offsets
        target = torch.from_numpy(data[data_start + low : data_start + high])
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


# Transports


class FileTransport:
    """Base of transports that stage weights as files."""

    def __init__(self, folder: Path) -> None:
        self.staging = WeightStaging(folder)

    def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.staging.write(weights, version)

    def release_previous(self, version: int) -> None:
        self.staging.keep_only(version)

    def close(self) -> None:
        self.staging.drop_spare()


class _VersionReply(Struct):
    version: int | None = None
    weight_version: str | int | None = None


def parse_version(engine: EngineHttpClient, path: str, body: bytes) -> int | None:
    """The version in an engine's answer; None if its label is not one of Polar's. Raises EngineError."""
    try:
        reply = msgspec.json.decode(body, type=_VersionReply)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{engine.url}{path} did not answer with a version: {error}.") from error
    version = reply.version if reply.version is not None else reply.weight_version
    return int(str(version)) if str(version).isdecimal() else None


class EmbeddedTransport(FileTransport):
    """Updates Polar's embedded engine, which loads a file in one call."""

    async def load(self, engine: EngineHttpClient, version: int) -> None:
        body = {"path": str(self.staging.get_weights_file(version)), "version": version}
        await engine.request("POST", "/update_weights", msgspec.json.encode(body), timeout=LOAD_SECONDS)

    async def read_version(self, engine: EngineHttpClient) -> int | None:
        path = "/weight_version"
        return parse_version(engine, path, await engine.request("GET", path))

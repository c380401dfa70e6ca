"""Weights as files, for engines on the same machine: in memory where there is a place for that.

The latest ones stay, so that an engine that is started again finds them.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from polar.errors import ConfigError

_MEMORY = Path("/dev/shm")
_FILE = "model.safetensors"


def staging_folder(run: Path) -> Path:
    """Of a run that keeps its own things in the folder `run`: the same one each time that it is asked for."""
    shared = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return shared / f"polar-weights-{os.getuid()}-{name}"


class Staging:
    """One folder a version, each with a file of weights as a Hugging Face checkpoint has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def of(self, version: int) -> Path:
        return self.folder / str(version)

    def file(self, version: int) -> Path:
        return self.of(version) / _FILE

    def write(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whole, or not at all."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        unfinished = self.folder / f"{version}.unfinished"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            if shutil.disk_usage(self.folder).free < size:
                raise ConfigError(
                    f"The weights take {size / 1e6:.0f} MB, and {self.folder} has no room for them: "
                    "free some, or name another folder for them."
                )
            unfinished.mkdir()
            save_file(_apart(weights), unfinished / _FILE, metadata={"format": "pt", "version": str(version)})
            shutil.rmtree(self.of(version), ignore_errors=True)  # of an update that failed
            unfinished.rename(self.of(version))
        except OSError as error:
            raise ConfigError(f"The weights can't be written to {self.folder}: {error.strerror or error}.") from error

    def keep_only(self, version: int) -> None:
        for folder in self.folder.iterdir():
            if folder.name != str(version):
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


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

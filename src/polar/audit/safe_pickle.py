"""Files that torch or pickle wrote, read without running anything that stands in them.

A pickle is a program: it may name any function and have it called. Here only names of data are known (tensors, numpy's
arrays, and the containers of verl, which are read as plain dicts, without verl). A file with any other name is refused.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polar.errors import ConfigError

_ZIP_MAGIC, _PICKLE_MAGIC = b"PK", b"\x80"


class _DataProto:
    """verl's batch: tensors (as bytes of torch's), other columns, facts."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _TensorDict:
    """The name of the class is all that a pickle needs."""


def load(file: Path) -> Any:
    """Raises ConfigError: with what it may not hold, or because it is no such file."""
    data = file.read_bytes()
    try:
        found = _load_torch(data) if data.startswith(_ZIP_MAGIC) else _DataUnpickler(io.BytesIO(data)).load()
        if isinstance(found, _DataProto):
            batch, others, facts = found.state
            if not isinstance(batch, bytes):
                raise pickle.UnpicklingError("its tensors were written as numpy's bytes")
            found = {**_load_torch(batch), **others, "meta_info": facts}
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        told = next((line for line in reason if "GLOBAL" in line or "global" in line), reason[-1] if reason else "")
        raise ConfigError(
            f"{file} was not read: {told.strip().rstrip('.')[:200]}. Only plain data is read from pickles, as they can "
            f"run anything: write JSON lines instead, or save plain dicts, lists and tensors."
        ) from error
    return found


def is_pickled(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2).startswith((_ZIP_MAGIC, _PICKLE_MAGIC))


def _numpy_globals() -> dict[str, Callable[..., Any]]:
    array: Any = np.zeros(1).__reduce__()[0]
    scalar: Any = np.float32(0).__reduce__()[0]
    names: dict[str, Callable[..., Any]] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names |= {f"{module}._reconstruct": array, f"{module}.scalar": scalar}
    kinds = (type(np.dtype(code)) for code in "?bBhHiIlLqQefdOU")
    return names | {f"numpy.dtypes.{kind.__name__}": kind for kind in kinds}


def _load_torch(data: bytes) -> Any:
    torch = _import_torch()
    known: Mapping[str, Callable[..., Any]] = _numpy_globals() | {
        "verl.protocol.DataProto": _DataProto,
        "tensordict._td.TensorDict": _TensorDict,
        "tensordict._reductions._make_td": _rebuild_tensor_dict,
        "tensordict._reductions._rebuild_tensordict_files_consolidated": _rebuild_consolidated,
    }
    with torch.serialization.safe_globals([(it, name) for name, it in known.items()]):
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _import_torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise ConfigError(f"Reading this file needs torch ({error}): pip install 'polar[verify]'.") from error


def _rebuild_tensor_dict(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """A TensorDict as it is."""
    return dict(state["_tensordict"])


def _rebuild_consolidated(metadata: Mapping[str, Any], storage: Any) -> dict[str, Any]:
    """A TensorDict whose tensors are stretches of one array of bytes."""
    torch = _import_torch()
    tensors = {}
    for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        values = storage[start:stop].view(kind)
        tensors[name] = values[: int(np.prod(shape))].view(*shape)
    return tensors


class _DataUnpickler(pickle.Unpickler):
    """What `DataProto.save_to_disk` writes."""

    def find_class(self, module: str, name: str) -> Any:
        known = _numpy_globals() | {"verl.protocol.DataProto": _DataProto}
        try:
            return known[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds the global {module}.{name}") from None

"""Token ids and log-probabilities as bytes: int32 and float32, little-endian, bit for bit.

Nothing is converted on the way in: an array of another type is refused, since a silent cast could change a value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.records.exchange import Logprobs, TokenIds

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
ID_SIZE = _INT32.itemsize
NO_IDS: TokenIds = np.empty(0, np.int32)


def ids_to_bytes(ids: TokenIds) -> bytes:
    return _to_bytes(ids, np.dtype(np.int32), _INT32)


def bytes_to_ids(data: bytes | bytearray) -> TokenIds:
    """Decodes ids. The array is a copy of bytes, but a view of a bytearray, which the caller must not change."""
    return _from_bytes(data, _INT32).astype(np.int32, copy=False)


def logprobs_to_bytes(logprobs: Logprobs) -> bytes:
    return _to_bytes(logprobs, np.dtype(np.float32), _FLOAT32)


def bytes_to_logprobs(data: bytes) -> Logprobs:
    return _from_bytes(data, _FLOAT32).astype(np.float32, copy=False)


def count_shared_prefix(a: TokenIds, b: TokenIds) -> int:
    """Counts the leading ids that are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _to_bytes(array: NDArray[Any], expected: np.dtype[Any], stored: np.dtype[Any]) -> bytes:
    if array.dtype != expected or array.ndim != 1:
        raise TypeError(f"expected a one-dimensional array of {expected}, not {array.ndim} dimensions of {array.dtype}")
    return array.astype(stored, copy=False).tobytes()


def _from_bytes(data: bytes | bytearray, stored: np.dtype[Any]) -> NDArray[Any]:
    array = np.frombuffer(data, stored)
    return array if array.flags.writeable else array.copy()

"""Which experts of a mixture each token was routed to, for trainers that route their own forward pass likewise.

Engines tell it call by call, as an array of tokens x layers x experts: of every token of the prompt and of what was
sampled but the last one, which has not gone through the model yet. It is stored as it comes, as a .npy file; so it is
told on the wire, in base64.
"""

import base64
import io

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.integer]


def decode_experts(data: bytes, tokens: int) -> Experts | None:
    """Of a call with so many tokens, prompt and sampled; None where it does not fit them: rather none than those of
    other tokens. Some engines have a row for the last one, too, which says nothing."""
    try:
        found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception:  # noqa: BLE001  # a header is read as a Python literal: a broken one raises whatever it likes
        return None
    if found.ndim != 3 or found.dtype.kind not in "iu" or len(found) not in (tokens - 1, tokens):
        return None
    experts: Experts = found[: tokens - 1]
    return experts


def encode_experts(experts: Experts) -> bytes:
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return file.getvalue()


def to_wire(experts: Experts) -> str:
    return base64.b64encode(encode_experts(experts)).decode("ascii")


def from_wire(text: str, tokens: int) -> Experts | None:
    """Raises ValueError where it is not base64."""
    return decode_experts(base64.b64decode(text), tokens)

"""Exchanges as an Arrow stream: token arrays in binary, one record batch per exchange, so that memory stays flat."""

from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa

from polar.gateway import view
from polar.store.base import Store
from polar.trajectory.session import roles_of

_ARRAYS = {
    "prompt_ids": pa.list_(pa.int32()),
    "sampled_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "policy_versions": pa.list_(pa.int64()),
}
_NUMBERS = {
    "seq": pa.int64(),
    "malformed": pa.bool_(),
    "mixed_kv": pa.bool_(),
    "delivered": pa.int64(),
    "started_at": pa.float64(),
    "first_token_at": pa.float64(),
    "ended_at": pa.float64(),
    "routed_experts": pa.binary(),
}
_JSON = ("request", "params", "hints", "reply", "sampling", "usage")
"""Columns that hold JSON text, since their shape is the harness's own."""
_TEXT = (
    "exchange_id",
    "session_id",
    "parent",
    "agent_id",
    "dialect",
    "role",
    "status",
    "error",
    "logprob_kind",
    "finish_reason",
    "continuation",
    "branch_reason",
    "untrainable",
    "replica",
)

SCHEMA = pa.schema({**dict.fromkeys((*_TEXT, *_JSON), pa.string()), **_NUMBERS, **_ARRAYS})


class _Buffer:
    """Takes what Arrow's writer writes, to be handed on piece by piece."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data

    def flush(self) -> None: ...


async def to_stream(store: Store, session_id: str) -> AsyncIterator[bytes]:
    buffer = _Buffer()
    labels = await roles_of(store, session_id)
    with pa.ipc.new_stream(pa.PythonFile(buffer, mode="w"), SCHEMA) as writer:
        async for exchange in store.exchanges(session_id):
            row = view.exchange(exchange, labels[exchange.exchange_id])
            for name in _JSON:
                row[name] = view.encode(row[name]).decode()
            # Straight from the arrays: NaN stays NaN here.
            row |= {name: getattr(exchange, name) for name in ("prompt_ids", "sampled_ids", "logprobs")}
            writer.write_batch(pa.RecordBatch.from_pylist([row], SCHEMA))
            yield buffer.take()
    yield buffer.take()

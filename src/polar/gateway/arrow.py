"""Exchanges as an Arrow stream: token arrays in binary, one record batch per exchange, so that memory stays flat."""

from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa

from polar.gateway import view
from polar.store.base import Store
from polar.trajectory.session import load_roles

_ARRAY_COLUMNS = {
    "prompt_ids": pa.list_(pa.int32()),
    "sampled_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "policy_versions": pa.list_(pa.int64()),
}
_SCALAR_COLUMNS = {
    "seq": pa.int64(),
    "malformed": pa.bool_(),
    "mixed_kv": pa.bool_(),
    "delivered": pa.int64(),
    "started_at": pa.float64(),
    "first_token_at": pa.float64(),
    "ended_at": pa.float64(),
    "routed_experts": pa.binary(),
}
_JSON_COLUMNS = ("request", "params", "hints", "reply", "sampling", "usage")
"""Columns that hold JSON text, since their shape is the harness's own."""
_TEXT_COLUMNS = (
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

SCHEMA = pa.schema(
    {**dict.fromkeys((*_TEXT_COLUMNS, *_JSON_COLUMNS), pa.string()), **_SCALAR_COLUMNS, **_ARRAY_COLUMNS}
)


class _Buffer:
    """A file for Arrow's writer, whose content is taken out piece by piece."""

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


async def stream_exchanges(store: Store, session_id: str) -> AsyncIterator[bytes]:
    buffer = _Buffer()
    labels = await load_roles(store, session_id)
    with pa.ipc.new_stream(pa.PythonFile(buffer, mode="w"), SCHEMA) as writer:
        async for exchange in store.read_exchanges(session_id):
            row = view.exchange_to_dict(exchange, labels[exchange.exchange_id])
            for name in _JSON_COLUMNS:
                row[name] = view.encode_json(row[name]).decode()
            # Straight from the arrays: NaN stays NaN here.
            row |= {name: getattr(exchange, name) for name in ("prompt_ids", "sampled_ids", "logprobs")}
            writer.write_batch(pa.RecordBatch.from_pylist([row], SCHEMA))
            yield buffer.take()
    yield buffer.take()

"""Parquet, the lossless one: a row for each trace, with all that is known of it and of its session.

Ids are int32 and log-probabilities float32, bit for bit. What belongs to the session stands in each of its rows; only
what was excluded stands in the first one alone. A session with nothing to train has one row, in which everything of the
trace is null. `read` gives the builder's trajectories back.

Who divides: whoever reads it; each trace has its `weight`.

What is lost: messages. The polar and sft formats have them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.export.base import ExportNeed, SessionItem
from polar.records.spans import ExcludedSpan, Span, TokenCounts
from polar.records.trajectory import Trace, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

_ROW_GROUP_BYTES = 16 * 1024 * 1024
"""Bytes, roughly, that are held before they are written. All that stays of them is their line in the file's footer."""
_BYTES_PER_TOKEN = 4 + 1 + 4 + 4  # id, mask, log-probability, version
_BYTES_PER_ROW = 1024


class ParquetRows(ABC):
    """An exporter that writes rows of a table, some megabytes at a time."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[ExportNeed]]
    is_binary: ClassVar[bool] = True

    def __init__(self) -> None:
        pq = _import_pyarrow_parquet()
        self.rows = 0
        self.left_out: Counter[str] = Counter()
        self._sink = _BytesSink()
        self._schema = self.schema()
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._pending_rows: list[dict[str, Any]] = []
        self._pending_bytes = 0

    @abstractmethod
    def schema(self) -> "pa.Schema": ...

    @abstractmethod
    def make_rows(self, item: SessionItem) -> Iterator[dict[str, Any]]:
        """The rows of a session."""
        ...

    @abstractmethod
    def estimate_bytes(self, item: SessionItem, rows: list[dict[str, Any]]) -> int:
        """Bytes that they take, roughly."""
        ...

    def feed(self, item: SessionItem) -> bytes:
        found = list(self.make_rows(item))
        self._pending_rows += found
        self._pending_bytes += self.estimate_bytes(item, found)
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()
        return self._sink.take()

    def finish(self) -> bytes:
        self._flush()
        self._writer.close()
        return self._sink.take()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._pending_rows, self._schema))
        self.rows += len(self._pending_rows)
        self._pending_rows.clear()
        self._pending_bytes = 0


class ParquetExporter(ParquetRows):
    name: ClassVar[str] = "parquet"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset()

    def schema(self) -> "pa.Schema":
        return trace_schema()

    def make_rows(self, item: SessionItem) -> Iterator[dict[str, Any]]:
        return trace_rows(item)

    def estimate_bytes(self, item: SessionItem, rows: list[dict[str, Any]]) -> int:
        return _BYTES_PER_TOKEN * item.trajectory.tokens.computed + _BYTES_PER_ROW * len(rows)


class _BytesSink:
    """Takes what Arrow writes, to be handed on piece by piece."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._written = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._written += len(piece)
        return len(piece)

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    def tell(self) -> int:
        return self._written

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _import_pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"The parquet format needs pyarrow: {install_hint('arrow')}.") from error
    return pq


def trace_schema() -> "pa.Schema":
    import pyarrow as pa

    text, ids = pa.string(), pa.list_(pa.int32())
    span = pa.struct({"exchange_id": text, "start": pa.int64(), "stop": pa.int64(), "offset": pa.int64()})
    excluded = pa.struct({"exchange_id": text, "start": pa.int64(), "stop": pa.int64(), "reason": text})
    tokens = pa.struct({"computed": pa.int64(), "unique": pa.int64(), "trainable": pa.int64()})
    return pa.schema(
        {
            "session_id": text,
            "task_id": text,
            "run": text,
            "created_at": pa.float64(),
            "ended_at": pa.float64(),
            "metadata": text,  # JSON, since its shape is the user's own
            "builder": text,
            "session_reward": pa.float64(),
            "session_reason": text,
            "suspicious": pa.bool_(),
            "tokens": tokens,
            "excluded": pa.list_(excluded),
            "traces": pa.int64(),
            "trace": pa.int64(),
            "prompt_ids": ids,
            "response_ids": ids,
            "loss_mask": pa.list_(pa.uint8()),
            "logprobs": pa.list_(pa.float32()),
            "policy_versions": ids,
            "weight": pa.float64(),
            "exchange_ids": pa.list_(text),
            "spans": pa.list_(span),
            "role": text,
            "agent_id": text,
            "branch_reason": text,
            "temperature": pa.float64(),
            "finish_reason": text,
            "reward": pa.float64(),
            "reason": text,
            "turn_rewards": pa.list_(pa.struct({"exchange_id": text, "reward": pa.float64()})),
        }
    )


_ARRAY_TYPES = {"prompt_ids": np.int32, "response_ids": np.int32, "loss_mask": np.uint8, "policy_versions": np.int32}
_PLAIN_COLUMNS = ("weight", "exchange_ids", "role", "agent_id", "branch_reason", "temperature", "finish_reason")
_TRACE_COLUMNS = (*_ARRAY_TYPES, *_PLAIN_COLUMNS, "logprobs", "spans", "reward", "reason", "turn_rewards", "trace")


def trace_rows(item: SessionItem) -> Iterator[dict[str, Any]]:
    session, trajectory = item.session, item.trajectory
    common = {
        "session_id": session.session_id,
        "task_id": item.group_id,
        "run": session.run,
        "created_at": session.created_at,
        "ended_at": session.ended_at,
        "metadata": msgspec.json.encode(session.metadata).decode(),
        "builder": trajectory.builder,
        "session_reward": trajectory.reward,
        "session_reason": trajectory.reason,
        "suspicious": session.suspicious,
        "tokens": msgspec.to_builtins(trajectory.tokens),
        "traces": len(trajectory.traces),
    }
    excluded = msgspec.to_builtins(trajectory.excluded)
    if not trajectory.traces:
        yield {**common, "excluded": excluded, **dict.fromkeys(_TRACE_COLUMNS)}
    for index, trace in enumerate(trajectory.traces):
        yield {**common, "excluded": [] if index else excluded, **_trace_columns(index, trace)}


def _trace_columns(index: int, trace: Trace) -> dict[str, Any]:
    return {
        "trace": index,
        **{name: getattr(trace, name) for name in (*_ARRAY_TYPES, *_PLAIN_COLUMNS)},
        "logprobs": trace.logprobs,
        "spans": msgspec.to_builtins(trace.spans),
        "reward": trace.reward,
        "reason": trace.reason,
        "turn_rewards": [{"exchange_id": name, "reward": reward} for name, reward in trace.turn_rewards.items()],
    }


def read(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a file, in order, a row group in memory at a time."""
    trajectory: Trajectory | None = None
    left = 0
    for batch in _import_pyarrow_parquet().ParquetFile(path).iter_batches(batch_size=64):
        for row in batch.to_pylist():
            if left == 0:
                trajectory = Trajectory(
                    session_id=row["session_id"],
                    builder=row["builder"],
                    traces=[],
                    excluded=msgspec.convert(row["excluded"], list[ExcludedSpan]),
                    tokens=msgspec.convert(row["tokens"], TokenCounts),
                    reward=row["session_reward"],
                    reason=row["session_reason"],
                )
                left = row["traces"]
            if trajectory is None:
                raise ValueError(f"{path} begins in the middle of a session")
            if row["trace"] is not None:
                trajectory.traces.append(_to_trace(row))
                left -= 1
            if left == 0:
                yield trajectory


def _to_trace(row: dict[str, Any]) -> Trace:
    arrays: dict[str, Any] = {name: np.array(row[name], kind) for name, kind in _ARRAY_TYPES.items()}
    return Trace(
        session_id=row["session_id"],
        **arrays,
        **{name: row[name] for name in _PLAIN_COLUMNS},
        logprobs=None if row["logprobs"] is None else np.array(row["logprobs"], np.float32),
        spans=msgspec.convert(row["spans"], list[Span]),
        reward=row["reward"],
        reason=row["reason"],
        turn_rewards={given["exchange_id"]: given["reward"] for given in row["turn_rewards"]},
    )

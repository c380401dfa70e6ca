"""Tinker: a line is a `Datum`, one for each trace: the first L - 1 tokens go in, and each target is the token after.

Who divides: nobody. Tinker's losses are sums over tokens, so a session's share grows with its tokens; `polar.weight`
divided by the trace's trainable tokens is the factor that makes sessions equal. `advantages` hold the session's reward
on each target that trains: subtract your group's baseline, or pass the advantage to `to_datum`. Without a reward there
are none.

What is lost: nothing that trains. A trace without a prompt has no input for its first token, and is left out.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from polar.export.base import (
    ExportNeed,
    SessionItem,
    TraceLines,
    list_token_rewards,
    pad_over_prompt,
    require_logprobs,
    trace_metadata,
    trace_token_ids,
)
from polar.records.trajectory import Trace


class TinkerExporter(TraceLines):
    name: ClassVar[str] = "tinker"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "logprobs"))

    def build_lines(self, item: SessionItem) -> Iterable[dict[str, Any]]:
        for index, trace in enumerate(item.trajectory.traces):
            if len(trace.prompt_ids):
                yield self.build_row(item, index, trace)
            else:
                self.left_out["trace without a prompt"] += 1

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        ids = trace_token_ids(trace)
        inputs = {
            "target_tokens": _tensor_to_dict(ids[1:].tolist(), "int64"),
            "logprobs": _tensor_to_dict(
                pad_over_prompt(trace, require_logprobs(trace.logprobs), fill=0.0)[1:], "float32"
            ),
        }
        if (advantages := list_token_rewards(trace)) is not None:
            inputs["advantages"] = _tensor_to_dict(advantages[1:], "float32")
        return {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": ids[:-1].tolist()}]},
            "loss_fn_inputs": inputs,
            "polar": trace_metadata(item, index, trace),
        }


def _tensor_to_dict(values: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def to_datum(row: dict[str, Any], advantage: float | None = None) -> Any:
    """A `tinker.Datum`; with `advantage`, that one on each target that trains."""
    from tinker import Datum, ModelInput, TensorData

    inputs = {
        name: TensorData(data=tensor["data"], dtype=tensor["dtype"], shape=tensor["shape"])
        for name, tensor in row["loss_fn_inputs"].items()
    }
    if advantage is not None:
        values = np.zeros(len(row["loss_fn_inputs"]["target_tokens"]["data"]), np.float32)
        first = row["polar"]["prompt_length"] - 1
        for start, stop in row["polar"]["spans"]:
            values[first + start : first + stop] = advantage
        inputs["advantages"] = TensorData.from_numpy(values)
    return Datum(model_input=ModelInput.model_validate(row["model_input"]), loss_fn_inputs=inputs)

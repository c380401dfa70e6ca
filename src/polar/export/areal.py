"""AReaL: a line holds the tensors of one trace as lists, [1, L] and [1]. `to_tensors` makes tensors of them.

Who divides: the trainer; its loss is a mean over all tokens that train, so tokens count and not rows. Group and weight
of a row are under `polar`, beside the tensors. AReaL normalises rewards over rows, by position: with several traces a
session, pass the advantage to `to_tensors`, as `polar.bridges.areal` does.

What is lost: nothing that trains. `versions` is -1 for context, and for a token whose version nobody knows.
"""

from typing import Any, ClassVar

from polar.export.base import (
    ExportNeed,
    SessionItem,
    TraceLines,
    pad_over_prompt,
    require_logprobs,
    trace_metadata,
    trace_token_ids,
)
from polar.records.trajectory import NO_VERSION, Trace


class ArealExporter(TraceLines):
    name: ClassVar[str] = "areal"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "reward", "logprobs"))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        ids = trace_token_ids(trace)
        return {
            "input_ids": [ids.tolist()],
            "loss_mask": [pad_over_prompt(trace, trace.loss_mask)],
            "logprobs": [pad_over_prompt(trace, require_logprobs(trace.logprobs), fill=0.0)],
            "versions": [pad_over_prompt(trace, trace.policy_versions, fill=NO_VERSION)],
            "attention_mask": [[True] * len(ids)],
            "rewards": [trace.reward],
            "polar": trace_metadata(item, index, trace),
        }


def to_tensors(row: dict[str, Any], reward: float | None = None) -> dict[str, Any]:
    """What a workflow's `arun_episode` returns for one trajectory; several go through `concat_padded_tensors`. `reward`
    goes in place of the session's own: an advantage, say."""
    import torch

    types = {
        "input_ids": torch.int32,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "attention_mask": torch.bool,
        "rewards": torch.float32,
    }
    values = row if reward is None else row | {"rewards": [reward]}
    return {name: torch.tensor(values[name], dtype=kind) for name, kind in types.items()}

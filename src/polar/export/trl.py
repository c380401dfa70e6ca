"""TRL: a line is one completion of what a `rollout_func` returns; `rollout` puts lines together.

Who divides: the trainer, as `loss_type` says; by default it divides by all tokens that train, so tokens count and not
rows. `weight` comes along, but no loss of TRL's reads it. Rewards come from the trainer's reward functions, which get
every further key as an argument: `reward_func(completions, reward, **kwargs)` returns the recorded ones.

What is lost: nothing that trains. A completion counts as cut off unless its last token is the tokenizer's end token, so
leave `mask_truncated_completions` off. All rows have log-probabilities or none has: TRL takes them for all.

Its asynchronous trainer takes a `RolloutSample` a trace, which `to_sample` makes of a line.
"""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from polar.export.base import ExportNeed, SessionItem, TraceLines, list_logprobs, trace_metadata
from polar.records.trajectory import Trace


class TrlExporter(TraceLines):
    name: ClassVar[str] = "trl"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces",))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        return {
            "prompt_ids": trace.prompt_ids.tolist(),
            "completion_ids": trace.response_ids.tolist(),
            "logprobs": list_logprobs(trace),
            "env_mask": trace.loss_mask.tolist(),
            **trace_metadata(item, index, trace),
        }


def to_rollout_columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a `rollout_func` returns: a dict of lists. Log-probabilities are None, for all, where one row has none."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    if any(values is None for values in columns["logprobs"]):
        columns["logprobs"] = None
    return columns


def make_filler_row(like: dict[str, Any], pad_token_id: int, reason: str) -> dict[str, Any]:
    """A row that trains nothing and has no reward, for a place that must not be empty."""
    own = {
        "prompt_ids": [pad_token_id],
        "completion_ids": [pad_token_id],
        "logprobs": [0.0],
        "env_mask": [0],
        "reason": reason,
    }
    return dict.fromkeys(like) | {"reward": None} | own


def to_sample(row: dict[str, Any], *, advantage: float, model_version: int, group_id: int) -> Any:
    """A `RolloutSample` of trl.experimental.async_grpo. Raises ValueError for a row without log-probabilities."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if row["logprobs"] is None:
        raise ValueError("a trace without log-probabilities reached a trainer that needs them")
    context = [0] * len(row["prompt_ids"])
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array(row["prompt_ids"] + row["completion_ids"], np.int64),
        completion_mask=np.array(context + row["env_mask"], np.int64),
        old_log_probs=np.array(context + row["logprobs"], np.float32),
        advantage=advantage,
        model_version=model_version,
        group_id=group_id,
        metrics={"reward": row["reward"]},
        enqueued_at=time.time(),
    )

"""verl: a line is `AgentLoopOutput(**row)`, one for each trace.

Who divides: the trainer, as `loss_agg_mode` says. It has no weights for rows (yet), so a session of several traces
weighs more than one of a single trace, unless the loss is a mean over tokens; `weight` is in `extra_fields`. Advantages
are the trainer's too, over sessions of one `uid` (`extra_fields.task_id`): its GRPO goes by keys, which `keys` gives.

What is lost: nothing that trains. A reward of null asks the trainer to compute one. verl puts a reward on the last
token of the response, whoever sampled it; rewards of single turns are in `extra_fields`, as are the first and the last
policy version of the trace, by verl's names for them.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from polar.export.base import ExportNeed, SessionItem, TraceLines, list_logprobs, list_version_runs, trace_metadata
from polar.records.trajectory import Trace


class VerlExporter(TraceLines):
    name: ClassVar[str] = "verl"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces",))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        return {
            "prompt_ids": trace.prompt_ids.tolist(),
            "response_ids": trace.response_ids.tolist(),
            "response_mask": trace.loss_mask.tolist(),
            "response_logprobs": list_logprobs(trace),
            "reward_score": trace.reward,
            "num_turns": _count_turns(trace),
            "metrics": {},
            "extra_fields": {
                **trace_metadata(item, index, trace),
                **_build_global_step_range(trace),
                "reward_extra_info": {},
            },
        }


def _count_turns(trace: Trace) -> int:
    """The prompt, each turn of the model, and each stretch of context between two of them."""
    gaps = sum(after.start > before.stop for before, after in zip(trace.spans, trace.spans[1:], strict=False))
    return 1 + len(trace.spans) + gaps


def _build_global_step_range(trace: Trace) -> dict[str, int | None]:
    """verl's versions are steps; it asks for the first and the last of a row."""
    known = list_version_runs(trace)
    return {"min_global_steps": min(known, default=None), "max_global_steps": max(known, default=None)}


def list_trajectory_keys(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows by verl's own names, `uid_session_index`, which its `compute_advantage_for_multi_trajectories` takes: one
    advantage for each session, whatever the number of its traces. Sessions are counted as they come."""
    sessions: dict[str, int] = {}
    named = []
    for row in rows:
        fields = row["extra_fields"]
        number = sessions.setdefault(fields["session_id"], len(sessions))
        named.append(f"{fields['task_id']}_{number}_{fields['trace']}")
    return named


def to_data_proto(rows: Sequence[dict[str, Any]], *, pad_token_id: int) -> Any:
    """Rows as one batch: a `verl.DataProto` with prompts padded on the left and responses on the right. The reward is
    on the last token of the response; rows without one need a reward model, and have no `rm_scores`."""
    import torch
    from verl import DataProto

    prompts = max(len(row["prompt_ids"]) for row in rows)
    responses = max(len(row["response_ids"]) for row in rows)

    def left(values: Sequence[float], fill: float) -> list[float]:
        return [fill] * (prompts - len(values)) + list(values)

    def right(values: Sequence[float], fill: float) -> list[float]:
        return list(values) + [fill] * (responses - len(values))

    prompt_ids = [left(row["prompt_ids"], pad_token_id) for row in rows]
    response_ids = [right(row["response_ids"], pad_token_id) for row in rows]
    attention = [left([1] * len(row["prompt_ids"]), 0) + right([1] * len(row["response_ids"]), 0) for row in rows]
    attended: NDArray[np.int64] = np.array(attention, np.int64)
    tensors = {
        "prompts": torch.tensor(prompt_ids),
        "responses": torch.tensor(response_ids),
        "response_mask": torch.tensor([right(row["response_mask"], 0) for row in rows]),
        "input_ids": torch.tensor([a + b for a, b in zip(prompt_ids, response_ids, strict=True)]),
        "attention_mask": torch.from_numpy(attended),
        "position_ids": torch.from_numpy(np.maximum(attended.cumsum(axis=1) - 1, 0)),
    }
    if all(row["response_logprobs"] is not None for row in rows):
        recorded = [right(row["response_logprobs"], 0.0) for row in rows]
        tensors["rollout_log_probs"] = torch.tensor(recorded, dtype=torch.float32)
    if all(row["reward_score"] is not None for row in rows):
        scores = torch.zeros(len(rows), responses, dtype=torch.float32)
        for scored, row in zip(scores, rows, strict=True):
            scored[len(row["response_ids"]) - 1] = row["reward_score"]
        tensors["rm_scores"] = scores
    others = {
        "uid": np.array([row["extra_fields"]["task_id"] for row in rows], dtype=object),
        "__num_turns__": np.array([row["num_turns"] for row in rows], dtype=np.int32),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=others)

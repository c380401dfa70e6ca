"""slime and Miles: a line is `Sample.from_dict`'s argument, one for each trace.

Who divides: the trainer, by the mask sum of the whole rollout. Traces of a session share a `rollout_id`, so a session
weighs the same however many traces it has; `weight` is there to be read (`metadata`), and must not be applied again.
Rewards are normalised by the trainer, over samples of one `group_index`. Its default does so by position, `n` samples
to a prompt: with several traces a session, set a normalisation that goes by `rollout_id`. A reward of null asks the
trainer for its reward model.

What is lost: nothing that trains. `weight_versions` are the trace's versions in order; those of each token are in
`metadata`, with its exchanges. `prompt` and `response` are empty: tokens are what trains.
"""

from typing import Any, ClassVar

from polar.export.base import (
    ExportNeed,
    SessionItem,
    TraceLines,
    compute_stable_number,
    list_logprobs,
    list_version_runs,
    trace_metadata,
    trace_token_ids,
)
from polar.records.trajectory import Trace

_STATUS_BY_FINISH_REASON = {"length": "truncated", "abort": "aborted"}


class SlimeExporter(TraceLines):
    name: ClassVar[str] = "slime"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces",))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        session_id = item.session.session_id
        return {
            "group_index": compute_stable_number(item.group_id),
            "index": compute_stable_number(session_id, str(index)),
            "rollout_id": compute_stable_number(session_id),
            "session_id": session_id,
            "prompt": "",
            "tokens": trace_token_ids(trace).tolist(),
            "response": "",
            "response_length": len(trace.response_ids),
            "loss_mask": trace.loss_mask.tolist(),
            "rollout_log_probs": list_logprobs(trace),
            "weight_versions": [str(version) for version in list_version_runs(trace)],
            "reward": trace.reward,
            "status": _STATUS_BY_FINISH_REASON.get(trace.finish_reason or "", "completed"),
            "remove_sample": False,
            "metadata": trace_metadata(item, index, trace),
        }

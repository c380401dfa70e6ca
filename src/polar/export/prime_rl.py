"""prime-rl: a line is a `TrainingSample` as its msgspec array, one for each trace: the order of the values counts.

Who divides: the trainer, by the tokens of the batch that train, so tokens count and not rows; `rl_weights` could say
otherwise, and is left to the trainer. `advantages` hold the session's reward on each token that trains: subtract your
group's baseline. Without a reward they are null, and the trainer has to assign them.

What is lost: the trace's weight, policy versions and exchanges; the array has no room for more. `trace_id` is the
session's id and `branch_index` the trace's place in it, so the rest can be looked up in another export.
"""

from typing import Any, ClassVar

import numpy as np

from polar.export.base import (
    ExportNeed,
    SessionItem,
    TraceLines,
    list_token_rewards,
    pad_over_prompt,
    require_logprobs,
    trace_token_ids,
)
from polar.records.trajectory import Trace

_DEFAULT_TEMPERATURE = 1.0
"""Of a call that named none."""


class PrimeRlExporter(TraceLines):
    name: ClassVar[str] = "prime-rl"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "logprobs"))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> list[Any]:
        ids = trace_token_ids(trace)
        return [
            ids.tolist(),
            [False] * len(trace.prompt_ids) + trace.loss_mask.astype(np.bool_).tolist(),
            pad_over_prompt(trace, require_logprobs(trace.logprobs), fill=0.0),
            _list_token_temperatures(item, trace),
            str(item.session.metadata.get("env", "polar")),  # env_name
            None,  # ref_logprobs
            None,  # multimodal inputs
            None,  # routed_experts
            None,  # mm_token_type_ids
            None,  # rl_weights
            None,  # ce_weights
            None,  # ref_kl_weights
            list_token_rewards(trace),  # advantages
            None,  # sampling_mask
            item.session.session_id,  # trace_id
            index,  # branch_index
        ]


def _list_token_temperatures(item: SessionItem, trace: Trace) -> list[float]:
    """Of each token the one that it was sampled at; of context the usual one, which nobody looks at."""
    used = {path.exchange_id: path.temperature for path in item.session_paths.paths}
    temperatures = [_DEFAULT_TEMPERATURE] * len(trace.response_ids)
    for span in trace.spans:
        named = used.get(span.exchange_id, trace.temperature)  # a live session has no paths
        temperatures[span.start : span.stop] = [_DEFAULT_TEMPERATURE if named is None else named] * (
            span.stop - span.start
        )
    return [_DEFAULT_TEMPERATURE] * len(trace.prompt_ids) + temperatures

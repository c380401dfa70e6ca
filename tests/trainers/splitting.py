"""The same session in more traces: each call of it is one, with all that stood before it as its prompt."""

import msgspec
import numpy as np

from polar.export.base import SessionItem
from polar.records.spans import Span
from polar.records.trajectory import Trace


def split(item: SessionItem) -> SessionItem:
    whole = item.trajectory.traces
    trainable = sum(int(trace.loss_mask.sum()) for trace in whole)
    traces = [_part(trace, span, trainable) for trace in whole for span in trace.spans]
    return msgspec.structs.replace(item, trajectory=msgspec.structs.replace(item.trajectory, traces=traces))


def _part(trace: Trace, span: Span, trainable: int) -> Trace:
    start, stop = span.start, span.stop
    mask = trace.loss_mask[start:stop]
    return msgspec.structs.replace(
        trace,
        prompt_ids=np.concatenate([trace.prompt_ids, trace.response_ids[:start]]),
        response_ids=trace.response_ids[start:stop],
        loss_mask=mask,
        logprobs=None if trace.logprobs is None else trace.logprobs[start:stop],
        policy_versions=trace.policy_versions[start:stop],
        weight=int(mask.sum()) / trainable,
        spans=[msgspec.structs.replace(span, start=0, stop=stop - start)],
    )

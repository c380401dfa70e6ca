"""ART: a line is a `TensorizedHistory` as its own JSON has it ("NaN" is a string there), one for each trace.

Who divides: the trainer. Rewards stand on ART's trajectories and not on their histories: here they are under `polar`,
with the group that advantages are computed over.

What is lost: nothing that trains. A token is flagged as exact (its id came from the engine) and, where it trains, as
sampled; what else ART's flags can say (assistant, stop) is the text's matter and is not said. The history is the one of
raw completions: tokens, and which of them were sampled.
"""

from typing import Any, ClassVar

from polar.export.base import ExportNeed, SessionItem, TraceLines, pad_over_prompt, trace_metadata, trace_token_ids
from polar.records.trajectory import Trace

FLAG_EXACT = 1 << 0
FLAG_SAMPLED = 1 << 1


class ArtExporter(TraceLines):
    name: ClassVar[str] = "art"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces",))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        begin = len(trace.prompt_ids)
        ids = trace_token_ids(trace).tolist()
        mask = pad_over_prompt(trace, trace.loss_mask)
        model = str(item.session.metadata.get("model", "polar"))
        return {
            "history": {
                "model": model,
                "prompt": ids,
                "prompt_sources": [],
                "sampled_spans": [[begin + span.start, begin + span.stop] for span in trace.spans],
            },
            "model": model,
            "tokens": ids,
            "logprobs": _list_logprobs_or_nan(trace, mask),
            "flags": [FLAG_EXACT | FLAG_SAMPLED if sampled else FLAG_EXACT for sampled in mask],
            "polar": trace_metadata(item, index, trace),
        }


def _list_logprobs_or_nan(trace: Trace, mask: list[int]) -> list[float | str]:
    if trace.logprobs is None:
        return ["NaN"] * len(mask)
    recorded = pad_over_prompt(trace, trace.logprobs, fill=0.0)
    return [value if sampled else "NaN" for value, sampled in zip(recorded, mask, strict=True)]

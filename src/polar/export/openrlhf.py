"""OpenRLHF: a line is what an agent executor's `execute` returns, one for each trace.

Who divides: the trainer; its loss is a mean over all tokens that train, so tokens count and not rows. Advantages are
the trainer's, over `n_samples_per_prompt` rows that stand together, so a session of several traces needs a baseline of
its own: `polar.bridges.openrlhf.trainer` has it. `weight` comes along under `polar`, where the trainer does not look.

What is lost: policy versions are under `polar` only. `prompt` names the task (the text is in the tokens), `label` is
null. A reward of null asks the trainer for its reward model.
"""

from typing import Any, ClassVar

from polar.export.base import ExportNeed, SessionItem, TraceLines, pad_over_prompt, trace_metadata, trace_token_ids
from polar.records.trajectory import Trace


class OpenRlhfExporter(TraceLines):
    name: ClassVar[str] = "openrlhf"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces",))

    def build_row(self, item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
        begin = len(trace.prompt_ids)
        return {
            "prompt": item.group_id,
            "label": None,
            "images": None,
            "mm_train_inputs": None,
            "reward": trace.reward,
            "scores": trace.reward,
            "observation_tokens": trace_token_ids(trace).tolist(),
            "action_ranges": [[begin + span.start, begin + span.stop] for span in trace.spans],
            "rollout_log_probs": None if trace.logprobs is None else pad_over_prompt(trace, trace.logprobs, fill=0.0),
            "truncated": trace.finish_reason == "length",
            "extra_logs": {},
            "polar": trace_metadata(item, index, trace),
        }

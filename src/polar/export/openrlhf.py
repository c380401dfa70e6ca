"""OpenRLHF: a line is what an agent executor's `execute` returns, one for each trace.

Who divides: the trainer; its loss is a mean over all tokens that train, so tokens count and not rows. Advantages are
the trainer's, over `n_samples_per_prompt` rows that stand together, so a session of several traces needs a baseline of
its own: `polar.bridges.openrlhf_trainer` has it. `weight` comes along under `polar`, where the trainer does not look.

What is lost: policy versions are under `polar` only. `prompt` names the task (the text is in the tokens), `label` is
null. A reward of null asks the trainer for its reward model.
"""

from typing import Any, ClassVar

from polar.export.base import Item, Need, TraceLines, facts, over_all, tokens
from polar.trajectory.types import Trace


class OpenRlhf(TraceLines):
    name: ClassVar[str] = "openrlhf"
    needs: ClassVar[frozenset[Need]] = frozenset(("traces",))

    def row(self, item: Item, index: int, trace: Trace) -> dict[str, Any]:
        begin = len(trace.prompt_ids)
        return {
            "prompt": item.group,
            "label": None,
            "images": None,
            "mm_train_inputs": None,
            "reward": trace.reward,
            "scores": trace.reward,
            "observation_tokens": tokens(trace).tolist(),
            "action_ranges": [[begin + span.start, begin + span.stop] for span in trace.spans],
            "rollout_log_probs": None if trace.logprobs is None else over_all(trace, trace.logprobs, prompt=0.0),
            "truncated": trace.finish_reason == "length",
            "extra_logs": {},
            "polar": facts(item, index, trace),
        }

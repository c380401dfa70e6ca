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

from polar.export.base import Item, Need, TraceLines, facts, logprobs, number, tokens, versions
from polar.trajectory.types import Trace

_STATUS = {"length": "truncated", "abort": "aborted"}


class Slime(TraceLines):
    name: ClassVar[str] = "slime"
    needs: ClassVar[frozenset[Need]] = frozenset(("traces",))

    def row(self, item: Item, index: int, trace: Trace) -> dict[str, Any]:
        session_id = item.session.session_id
        return {
            "group_index": number(item.group),
            "index": number(session_id, str(index)),
            "rollout_id": number(session_id),
            "session_id": session_id,
            "prompt": "",
            "tokens": tokens(trace).tolist(),
            "response": "",
            "response_length": len(trace.response_ids),
            "loss_mask": trace.loss_mask.tolist(),
            "rollout_log_probs": logprobs(trace),
            "weight_versions": [str(version) for version in versions(trace)],
            "reward": trace.reward,
            "status": _STATUS.get(trace.finish_reason or "", "completed"),
            "remove_sample": False,
            "metadata": facts(item, index, trace),
        }

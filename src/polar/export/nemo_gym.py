"""NeMo Gym, as NeMo RL reads it: a line is a verify response, one for each trace: a Responses object whose output items
carry `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, and the reward.

Each prompt holds everything before it, the trace's earlier turns included, so it extends what was seen before it.

Who divides: the trainer. Rewards are normalised over the rows of one prompt, so a session of several traces counts
several times there: see `polar.weight`, and `polar.bridges.nemo_rl`, which goes by session.

What is lost: policy versions, which are under `polar` only. What tools answered stands in the prompts' tokens; there
are no items for it. A model call has the items that it was parsed into, and the last one carries the tokens that train.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polar.export.base import ExportNeed, SessionItem, SessionLines, require_logprobs, trace_metadata, trace_token_ids
from polar.export.messages import index_conversation_calls
from polar.records.trajectory import Trace
from polar.types import Part, Reasoning, Text, ToolCall

Replies = Mapping[str, Sequence[Part]]
"""What the model said in each call, by exchange id. A call that is missing has an empty message: tokens are what
counts."""


class NemoGymExporter(SessionLines):
    name: ClassVar[str] = "nemo-gym"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "messages", "reward", "logprobs"))

    def build_lines(self, item: SessionItem) -> list[dict[str, Any]]:
        return verify_responses(
            item, {name: one.reply_message.parts for name, one in index_conversation_calls(item).items()}
        )


def verify_responses(item: SessionItem, replies: Replies) -> list[dict[str, Any]]:
    """One for each trace."""
    return [_verify_response(item, index, trace, replies) for index, trace in enumerate(item.trajectory.traces)]


def _verify_response(item: SessionItem, index: int, trace: Trace, replies: Replies) -> dict[str, Any]:
    ids, recorded, begin = trace_token_ids(trace), require_logprobs(trace.logprobs), len(trace.prompt_ids)
    output = []
    for span in trace.spans:
        items = _build_items(span.exchange_id, replies.get(span.exchange_id, ()))
        items[-1] |= {
            "prompt_token_ids": ids[: begin + span.start].tolist(),
            "generation_token_ids": trace.response_ids[span.start : span.stop].tolist(),
            "generation_log_probs": recorded[span.start : span.stop].tolist(),
        }
        output += items
    model = str(item.session.metadata.get("model", "polar"))
    name = f"resp_{item.session.session_id}_{index}"
    return {
        "responses_create_params": {"input": [], "model": model},
        "response": make_response(
            name, item.session.created_at, model, output, complete=trace.finish_reason != "length"
        ),
        "reward": trace.reward,
        "polar": trace_metadata(item, index, trace),
    }


def make_response(
    name: str, created_at: float, model: str, output: list[dict[str, Any]], *, complete: bool
) -> dict[str, Any]:
    """A Responses object."""
    return {
        "id": name,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": "completed" if complete else "incomplete",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _build_items(exchange_id: str, parts: Sequence[Part]) -> list[dict[str, Any]]:
    items = [_build_item(exchange_id, index, part) for index, part in enumerate(parts)]
    if not items or items[-1]["type"] == "reasoning":  # the tokens go on a message or a call
        items.append(_build_item(exchange_id, len(items), Text("")))
    return items


def _build_item(exchange_id: str, index: int, part: Part) -> dict[str, Any]:
    name = f"{exchange_id}_{index}"
    match part:
        case Reasoning():
            summary = [{"type": "summary_text", "text": part.text}]
            return {"type": "reasoning", "id": f"rs_{name}", "summary": summary}
        case ToolCall():
            called = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"type": "function_call", "id": f"fc_{name}", "status": "completed", **called}
        case _:
            text = part.text if isinstance(part, Text) else ""
            content = [{"type": "output_text", "text": text, "annotations": []}]
            return {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }

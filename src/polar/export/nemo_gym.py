"""NeMo Gym, as NeMo RL reads it: a line is a verify response, one for each trace: a Responses object whose output items
carry `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, and the reward.

Each prompt holds everything before it, the trace's earlier turns included, so it extends what was seen before it.

Who divides: the trainer. Rewards are normalised over the rows of one prompt, so a session of several traces counts
several times there: see `polar.weight`.

What is lost: policy versions, which are under `polar` only. What tools answered stands in the prompts' tokens; there
are no items for it. A model call has the items that it was parsed into, and the last one carries the tokens that train.
"""

from typing import Any, ClassVar

from polar.export.base import Item, Need, SessionLines, facts, needed, tokens
from polar.export.messages import Said, said_of
from polar.trajectory.types import Trace
from polar.types import Part, Reasoning, Text, ToolCall


class NemoGym(SessionLines):
    name: ClassVar[str] = "nemo-gym"
    needs: ClassVar[frozenset[Need]] = frozenset(("traces", "messages", "reward", "logprobs"))

    def lines(self, item: Item) -> list[dict[str, Any]]:
        said = said_of(item)
        return [self._response(item, index, trace, said) for index, trace in enumerate(item.trajectory.traces)]

    def _response(self, item: Item, index: int, trace: Trace, said: dict[str, Said]) -> dict[str, Any]:
        ids, recorded, begin = tokens(trace), needed(trace.logprobs), len(trace.prompt_ids)
        output = []
        for span in trace.spans:
            items = _items(span.exchange_id, said.get(span.exchange_id))
            items[-1] |= {
                "prompt_token_ids": ids[: begin + span.start].tolist(),
                "generation_token_ids": trace.response_ids[span.start : span.stop].tolist(),
                "generation_log_probs": recorded[span.start : span.stop].tolist(),
            }
            output += items
        model = str(item.session.metadata.get("model", "polar"))
        response = {
            "id": f"resp_{item.session.session_id}_{index}",
            "object": "response",
            "created_at": item.session.created_at,
            "model": model,
            "status": "incomplete" if trace.finish_reason == "length" else "completed",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        return {
            "responses_create_params": {"input": [], "model": model},
            "response": response,
            "reward": trace.reward,
            "polar": facts(item, index, trace),
        }


def _items(exchange_id: str, one: Said | None) -> list[dict[str, Any]]:
    parts: list[Part] = [] if one is None else list(one.reply.parts)
    items = [_item(exchange_id, index, part) for index, part in enumerate(parts)]
    if not items or items[-1]["type"] == "reasoning":  # the tokens go on a message or a call
        items.append(_item(exchange_id, len(items), Text("")))
    return items


def _item(exchange_id: str, index: int, part: Part) -> dict[str, Any]:
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

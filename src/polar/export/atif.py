"""ATIF, Harbor's Agent Trajectory Interchange Format (v1.7): a line is one session's trajectory document.

The first conversation is the document, and each other one (sub-agents, forks, compactions) a trajectory inside it. A
model call is an agent step, with its token ids and log-probabilities; what a tool answered is the step's observation.
Steps that a fork repeats are marked as copied context. The reward is in `extra`, with evidence of tampering.

Who divides: nobody; this is a record, not a batch.

What is lost: pictures that are no JPEG, PNG, GIF or WebP, and other media, whose place a note takes; arguments of a
tool call that are no JSON object, which stand under `input` as text; calls that no reply came of.
"""

from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
import numpy as np

from polar.export.base import ExportNeed, SessionItem, SessionLines
from polar.export.messages import ConversationBranch, ConversationCall, build_chat_tools, collect_branches
from polar.types import Media, Message, Reasoning, Text, ToolCall, ToolResult

SCHEMA_VERSION = "ATIF-v1.7"
_IMAGE_TYPES = frozenset(("image/jpeg", "image/png", "image/gif", "image/webp"))
_SOURCE_BY_ROLE = {"assistant": "agent", "user": "user"}  # anything else is the system's


class AtifExporter(SessionLines):
    name: ClassVar[str] = "atif"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages",))

    def build_lines(self, item: SessionItem) -> list[dict[str, Any]]:
        found = [conversation for conversation in collect_branches(item) if not conversation.calls[0].is_raw_completion]
        if not found:
            self.left_out["session without an answered chat"] += 1
            return []
        first, *others = [_build_trajectory(item, conversation) for conversation in found]
        first["extra"] = {
            "task_id": item.group_id,
            "reward": item.session_paths.reward,
            "reason": item.session_paths.reason,
            "suspicious": item.session.suspicious,
            "evidence": msgspec.to_builtins(item.session.evidence),
            "metadata": item.session.metadata,
        }
        if others:
            first["subagent_trajectories"] = others
        return [first]


def _build_trajectory(item: SessionItem, conversation: ConversationBranch) -> dict[str, Any]:
    calls = conversation.calls
    metadata = item.session.metadata
    steps = _StepWriter()
    history = calls[0].request_messages[: -len(calls[0].new_messages) or None]
    steps.add_messages(history, copied=conversation.is_fork)
    for one in calls:
        steps.add_messages(one.new_messages)
        steps.add_call(one)
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": item.session.session_id,
        "trajectory_id": calls[0].exchange.exchange_id,
        "agent": {
            "name": str(metadata.get("harness") or "unknown"),
            "version": str(metadata.get("harness_version") or "unknown"),
            "model_name": calls[0].call.request.model,
            "tool_definitions": build_chat_tools(calls[-1].tools),
            "extra": {"role": calls[0].role, "agent_id": calls[0].agent_id},
        },
        "steps": steps.steps,
        "final_metrics": {
            "total_prompt_tokens": sum(one.exchange.usage.prompt for one in calls),
            "total_completion_tokens": sum(one.exchange.usage.completion for one in calls),
            "total_cached_tokens": sum(one.exchange.usage.cached for one in calls),
            "total_steps": len(steps.steps),
        },
    }


class _StepWriter:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._step_by_call_id: dict[str, dict[str, Any]] = {}  # the step that made a tool call, by its id

    def add_messages(self, messages: list[Message], *, copied: bool = False) -> None:
        for message in messages:
            if message.role == "tool":
                for part in message.parts:
                    if isinstance(part, ToolResult):
                        self._add_observation(part)
                continue
            step = self._add_step(_SOURCE_BY_ROLE.get(message.role, "system"), message)
            if copied or step["source"] == "agent":  # a turn that is no call of this session was written by somebody
                step["is_copied_context"] = True

    def add_call(self, one: ConversationCall) -> None:
        exchange = one.exchange
        step = self._add_step("agent", one.reply_message)
        step["timestamp"] = datetime.fromtimestamp(exchange.ended_at, UTC).isoformat()
        step["model_name"] = one.call.request.model
        step["llm_call_count"] = 1
        step["metrics"] = _build_metrics(one)
        step["extra"] = {
            "exchange_id": exchange.exchange_id,
            "role": one.role,
            "agent_id": one.agent_id,
            "policy_versions": [[span.version, span.start, span.stop] for span in exchange.versions],
            "untrainable": exchange.untrainable,
            "finish_reason": exchange.finish_reason,
            "branch_reason": exchange.branch_reason,
        }

    def _add_step(self, source: str, message: Message) -> dict[str, Any]:
        step: dict[str, Any] = {
            "step_id": len(self.steps) + 1,
            "source": source,
            "message": _build_content(message.parts),
        }
        thoughts = [part.text for part in message.parts if isinstance(part, Reasoning)]
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if thoughts and source == "agent":
            step["reasoning_content"] = "".join(thoughts)
        if calls and source == "agent":
            step["tool_calls"] = [
                {"tool_call_id": call.id, "function_name": call.name, "arguments": _decode_arguments(call)}
                for call in calls
            ]
            self._step_by_call_id |= {call.id: step for call in calls}
        self.steps.append(step)
        return step

    def _add_observation(self, result: ToolResult) -> None:
        seen: dict[str, Any] = {"content": _build_content(result.parts)}
        step = self._step_by_call_id.get(result.call_id)
        if step is None:  # of a call that is not in this trajectory
            step = self._add_step("system", Message("system", []))
        else:
            seen["source_call_id"] = result.call_id
        if result.is_error:
            seen["extra"] = {"is_error": True}
        step.setdefault("observation", {"results": []})["results"].append(seen)


def _build_metrics(one: ConversationCall) -> dict[str, Any]:
    exchange, usage = one.exchange, one.exchange.usage
    metrics: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "cached_tokens": usage.cached,
    }
    if exchange.prompt_ids is not None:
        metrics["prompt_token_ids"] = exchange.prompt_ids.tolist()
    if exchange.sampled_ids is not None:
        metrics["completion_token_ids"] = exchange.sampled_ids.tolist()
    if exchange.logprobs is not None and np.isfinite(exchange.logprobs).all():  # others can't be said, and don't train
        metrics["logprobs"] = exchange.logprobs.tolist()
    return metrics


def _decode_arguments(call: ToolCall) -> dict[str, Any]:
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"input": call.arguments}


def _build_content(parts: list[Any]) -> str | list[dict[str, Any]]:
    """Text where there is nothing else."""
    if not any(isinstance(part, Media) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    shown: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            shown.append({"type": "text", "text": part.text})
        elif isinstance(part, Media):
            shown.append(_build_media(part))
    return shown


def _build_media(media: Media) -> dict[str, Any]:
    path = media.url if media.url is not None else f"data:{media.media_type};base64,{media.data}"
    if media.kind == "image" and media.media_type in _IMAGE_TYPES and media.file_id is None:
        return {"type": "image", "source": {"media_type": media.media_type, "path": path}}
    return {"type": "text", "text": f"[{media.kind}]"}

"""How vLLM's three generating routes write a reply, whole or as a stream."""

import json
import secrets
import time
from collections.abc import Iterable
from math import nan
from typing import Protocol

import msgspec
import numpy as np
from msgspec import UNSET

from polar.dialects import sse
from polar.engines.scripted import wire
from polar.engines.scripted.generation import Generation, Step
from polar.engines.scripted.output import OutputParser
from polar.engines.scripted.sampler import rank_alternatives, route_experts
from polar.records.experts import to_wire
from polar.rendering.tokenizer import Tokenizer
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

DONE = sse.encode_event(b"[DONE]")
_encode = msgspec.json.Encoder().encode  # writes NaN as null, as vLLM does


class ReplyWriter(Protocol):
    """Writes one reply. A stream is `begin`, `step` for each step, `usage` if asked for, and DONE; a whole reply is
    `step` for each step (the bytes unused), then `whole`."""

    def write_start(self) -> bytes: ...

    def write_step(self, step: Step) -> bytes: ...

    def write_usage(self, cached: int) -> bytes: ...

    def write_reply(self, cached: int) -> bytes: ...


class _LogprobReporter:
    """Log-probabilities of a generation's tokens, spoiled where the play says so."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, top: int | None) -> None:
        self._ids = generation.script.ids
        self._corruption = generation.script.turn.logprobs
        self._tokenizer = tokenizer
        self._top_count = top
        self.is_wanted = top is not None and self._corruption != "missing"

    def iterate_tokens(self, step: Step) -> Iterable[tuple[int, int, float]]:
        """Token id, the state before it, and its log-probability, for each token that one is reported for."""
        for place, state, value in zip(range(step.start, step.stop), step.states, step.logprobs, strict=True):
            if self._corruption == "short" and place == len(self._ids) - 1:
                return
            if place == len(self._ids) // 2 and self._corruption in ("nan", "sentinel"):
                value = nan if self._corruption == "nan" else -9999.0
            yield self._ids[place], state, value

    def list_candidates(self, state: int, id: int, count: int) -> list[tuple[int, float]]:
        return rank_alternatives(state, id, count, self._tokenizer.vocabulary_size) if count else []

    def make_text_logprobs(self, step: Step) -> wire.TextLogprobs | None:
        if not self.is_wanted:
            return None
        content = []
        for id, state, value in self.iterate_tokens(step):
            entry = self._text_entry(id, value)
            entry.top_logprobs = [
                self._text_entry(*one) for one in self.list_candidates(state, id, self._top_count or 0)
            ]
            content.append(entry)
        return wire.TextLogprobs(content)

    def make_id_logprobs(self, step: Step) -> wire.IdLogprobs | None:
        if not self.is_wanted:
            return None
        content = []
        for id, state, value in self.iterate_tokens(step):
            candidates = self.list_candidates(state, id, max(self._top_count or 0, 1))
            top = [wire.IdLogprob(other, its, rank) for rank, (other, its) in enumerate(candidates, 1)]
            content.append(wire.IdLogprob(id, value, 1, top))
        return wire.IdLogprobs(content)

    def make_completion_logprobs(self, step: Step, offset: int) -> wire.CompletionLogprobs | None:
        if not self.is_wanted:
            return None
        out = wire.CompletionLogprobs()
        for id, state, value in self.iterate_tokens(step):
            text = self._tokenizer.decode_token(id)
            out.text_offset.append(offset)
            out.token_logprobs.append(value)
            out.tokens.append(text)
            candidates = self.list_candidates(state, id, max(self._top_count or 0, 1))
            out.top_logprobs.append({self._tokenizer.decode_token(other): its for other, its in candidates})
            offset += len(text)
        return out

    def _text_entry(self, id: int, value: float) -> wire.TextLogprob:
        text = self._tokenizer.decode_token(id)
        return wire.TextLogprob(text, value, list(text.encode()))


def _usage(generation: Generation, cached: int, reasoning: int | None = None) -> wire.UsageInfo:
    prompt, completion = len(generation.script.prompt), generation.sampled
    return wire.UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=wire.PromptDetails(cached),
        completion_tokens_details=None if reasoning is None else wire.CompletionDetails(reasoning),
    )


class ChatWriter:
    def __init__(self, generation: Generation, tokenizer: Tokenizer, model: str, request: wire.ChatRequest) -> None:
        self._generation = generation
        self._script = generation.script
        self._logprobs = _LogprobReporter(
            generation, tokenizer, (request.top_logprobs or 0) if request.logprobs else None
        )
        self._wants_token_ids = bool(request.return_token_ids)
        self._parser = OutputParser(self._script.context.thinking == "begun", tools=bool(request.callable_tools))
        self._named_tool = isinstance(request.tool_choice, dict)
        self._reasoning_tokens = 0
        self._events: list[ReplyEvent] = []
        self._entries: list[wire.TextLogprob] = []
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model

    def write_start(self) -> bytes:
        first = wire.ChatChunkChoice(0, wire.Delta(role="assistant", content=""))
        prompt = self._script.prompt.tolist() if self._wants_token_ids else None
        chunk = wire.ChatChunk(self._id, self._created, self._model, [first], prompt_token_ids=prompt)
        return sse.encode_event(_encode(chunk))

    def write_step(self, step: Step) -> bytes:
        events: list[ReplyEvent] = []
        for text in self._script.texts[step.start : step.stop]:
            reasons = self._parser.is_reasoning
            events += self._parser.feed(text)
            self._reasoning_tokens += reasons and self._parser.is_reasoning
        if step.is_last:
            events += self._parser.finish()
        self._events += events
        logprobs = self._logprobs.make_text_logprobs(step)
        if logprobs is not None:
            self._entries += logprobs.content
        choice = wire.ChatChunkChoice(
            0,
            self._delta(events),
            logprobs,
            token_ids=self._script.ids[step.start : step.stop] if self._wants_token_ids else None,
        )
        if step.is_last:
            choice.finish_reason = self._finish_reason(self._parser.calls > 0)
            choice.stop_reason = self._generation.stop_reason
        return sse.encode_event(_encode(wire.ChatChunk(self._id, self._created, self._model, [choice])))

    def write_usage(self, cached: int) -> bytes:
        usage = _usage(self._generation, cached, self._reasoning_tokens)
        return sse.encode_event(_encode(wire.ChatChunk(self._id, self._created, self._model, [], usage=usage)))

    def write_reply(self, cached: int) -> bytes:
        message = self._message()
        choice = wire.ChatChoice(
            0,
            message,
            wire.TextLogprobs(self._entries) if self._logprobs.is_wanted else None,
            self._finish_reason(message.tool_calls is not UNSET),
            self._generation.stop_reason,
            self._script.ids[: self._generation.sampled] if self._wants_token_ids else None,
        )
        reply = wire.ChatReply(
            self._id,
            self._created,
            self._model,
            [choice],
            _usage(self._generation, cached, self._reasoning_tokens),
            prompt_token_ids=self._script.prompt.tolist() if self._wants_token_ids else None,
        )
        return _encode(reply)

    def _finish_reason(self, has_calls: bool) -> str:
        reason = self._generation.finish_reason
        return "tool_calls" if has_calls and reason == "stop" and not self._named_tool else reason

    def _delta(self, events: list[ReplyEvent]) -> wire.Delta:
        delta = wire.Delta()
        calls: list[wire.ToolCall] = []
        index = self._parser.calls - 1 - sum(isinstance(event, ToolCallStart) for event in events)
        for event in events:
            match event:
                case TextDelta(text):
                    delta.content = (delta.content or "") + text
                case ReasoningDelta(text):
                    delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
                case ToolCallStart(name=name):
                    index += 1
                    calls.append(wire.ToolCall(_call_id(), "function", index, wire.Function(name=name)))
                case ToolCallDelta(arguments):
                    calls.append(wire.ToolCall(index=index, function=wire.Function(arguments=arguments)))
        if calls:
            delta.tool_calls = calls
        return delta

    def _message(self) -> wire.Message:
        reasoning, text, calls = "", "", list[wire.ToolCall]()
        for event in self._events:
            match event:
                case ReasoningDelta(more):
                    reasoning += more
                case TextDelta(more):
                    text += more
                case ToolCallStart(name=name):
                    calls.append(wire.ToolCall(_call_id(), "function", function=wire.Function(name, "")))
                case ToolCallDelta(more):
                    calls[-1].function.arguments = f"{calls[-1].function.arguments or ''}{more}"
        try:
            for call in calls:  # vLLM parses them and writes them anew, unlike in a stream
                call.function.arguments = json.dumps(json.loads(str(call.function.arguments)), ensure_ascii=False)
        except ValueError:  # one call that doesn't parse, and it hands on the whole output as text
            text = self._output_after_reasoning()
            calls = []
        if calls and not text.strip():
            text = ""
        message = wire.Message(
            "assistant", text or None, reasoning=reasoning or None, reasoning_content=reasoning or None
        )
        if calls:
            message.tool_calls = calls
        return message

    def _output_after_reasoning(self) -> str:
        output = "".join(self._script.texts[: self._generation.sampled])
        return output.rpartition("</think>")[2]


def _call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class CompletionWriter:
    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, model: str, request: wire.CompletionRequest
    ) -> None:
        self._generation = generation
        self._script = generation.script
        self._logprobs = _LogprobReporter(generation, tokenizer, request.logprobs)
        self._wants_token_ids = bool(request.return_token_ids)
        self._all_logprobs = wire.CompletionLogprobs()
        self._offset = 0
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model

    def write_start(self) -> bytes:
        return b""

    def write_step(self, step: Step) -> bytes:
        logprobs = self._logprobs.make_completion_logprobs(step, self._offset)
        if logprobs is not None and logprobs.tokens:
            self._offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
            for name in logprobs.__struct_fields__:
                getattr(self._all_logprobs, name).extend(getattr(logprobs, name))
        return sse.encode_event(_encode(self._reply([self._choice(step, logprobs)])))

    def write_usage(self, cached: int) -> bytes:
        reply = self._reply([])
        reply.usage = _usage(self._generation, cached)
        return sse.encode_event(_encode(reply))

    def write_reply(self, cached: int) -> bytes:
        all_of_it = Step(0, self._generation.sampled, [], [], is_last=True)
        reply = self._reply([self._choice(all_of_it, self._all_logprobs if self._logprobs.is_wanted else None)])
        reply.usage = _usage(self._generation, cached)
        return _encode(reply)

    def _choice(self, step: Step, logprobs: wire.CompletionLogprobs | None) -> wire.CompletionChoice:
        return wire.CompletionChoice(
            0,
            "".join(self._script.texts[step.start : step.stop]),
            logprobs,
            self._generation.finish_reason if step.is_last else None,
            self._generation.stop_reason if step.is_last else None,
            token_ids=self._script.ids[step.start : step.stop] if self._wants_token_ids else None,
            prompt_token_ids=self._script.prompt.tolist() if self._wants_token_ids and step.start == 0 else None,
        )

    def _reply(self, choices: list[wire.CompletionChoice]) -> wire.CompletionReply:
        return wire.CompletionReply(self._id, self._created, self._model, choices)


class GenerateWriter:
    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        request: wire.GenerateRequest,
        *,
        experts: int = 0,
    ) -> None:
        self._generation = generation
        self._script = generation.script
        self._logprobs = _LogprobReporter(generation, tokenizer, request.sampling_params.logprobs)
        self._wants_prompt_ids = bool(request.return_token_ids)
        self._entries: list[wire.IdLogprob] = []
        self._id = request.request_id or secrets.token_hex(16)
        self._model = model
        self._experts = experts

    def write_start(self) -> bytes:
        return b""

    def write_step(self, step: Step) -> bytes:
        logprobs = self._logprobs.make_id_logprobs(step)
        if logprobs is not None:
            self._entries += logprobs.content
        chunk = wire.GenerateChunk(self._id, [self._choice(step, logprobs)])
        if self._wants_prompt_ids and step.start == 0:
            chunk.prompt_token_ids = self._script.prompt.tolist()
        return sse.encode_event(_encode(chunk))

    def write_usage(self, cached: int) -> bytes:
        return sse.encode_event(_encode(wire.GenerateChunk(self._id, [], _usage(self._generation, cached))))

    def write_reply(self, cached: int) -> bytes:
        all_of_it = Step(0, self._generation.sampled, [], [], is_last=True)
        choice = self._choice(all_of_it, wire.IdLogprobs(self._entries) if self._logprobs.is_wanted else None)
        reply = wire.GenerateReply(
            self._id, self._model, int(time.time()), _usage(self._generation, cached), choices=[choice]
        )
        if self._wants_prompt_ids:
            reply.prompt_token_ids = self._script.prompt.tolist()
        return _encode(reply)

    def _choice(self, step: Step, logprobs: wire.IdLogprobs | None) -> wire.GenerateChoice:
        choice = wire.GenerateChoice(0, None, None, self._script.ids[step.start : step.stop], logprobs, None)
        if step.is_last:
            choice.finish_reason = self._generation.finish_reason
            choice.stop_reason = self._generation.stop_reason
            choice.weight_versions = [
                wire.VersionSpan(str(span.version), span.start, span.stop) for span in self._generation.spans
            ]
            if self._experts:
                ids = np.concatenate([self._script.prompt, self._script.ids[: step.stop]])
                choice.routed_experts = to_wire(route_experts(ids, self._experts))
        return choice

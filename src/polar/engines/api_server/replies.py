"""How vLLM's three generating routes write a reply, whole or as a stream."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from polar.dialects import sse
from polar.engines.api_server import wire
from polar.engines.api_server.backend import Generation, SampledToken
from polar.rendering.tokenizer import Tokenizer
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

DONE = sse.encode_event(b"[DONE]")
encode_json = msgspec.json.Encoder().encode  # writes NaN as null, as vLLM does


class ReplyWriter(Protocol):
    """Writes one reply. A stream is `write_start`, `write_step` for each step, `write_usage` if asked for, and DONE; a
    whole reply is `write_reply` at the end. A step is written before anything more is sampled: it says how the
    generation stands."""

    def write_start(self) -> bytes: ...

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool) -> bytes: ...

    def write_usage(self) -> bytes: ...

    def write_reply(self) -> bytes: ...


class ReplyFormat(Struct, frozen=True):
    """What all replies of a server have in common."""

    model: str
    tokenizer: Tokenizer
    labels_every_chunk: bool

    def label_versions(self, generation: Generation) -> list[wire.VersionSpan] | UnsetType:
        """Of all tokens so far, in whatever route: a stream may break off behind any of them."""
        return _make_version_spans(generation) if self.labels_every_chunk else UNSET

    def make_text_logprobs(self, tokens: Sequence[SampledToken]) -> wire.TextLogprobs:
        content = []
        for token in tokens:
            if token.logprob is not None:
                entry = self._make_text_logprob(token.id, token.logprob)
                entry.top_logprobs = [self._make_text_logprob(id, value) for id, value in token.alternatives]
                content.append(entry)
        return wire.TextLogprobs(content)

    def _make_text_logprob(self, id: int, value: float) -> wire.TextLogprob:
        text = self.tokenizer.decode_token(id)
        return wire.TextLogprob(text, value, list(text.encode("utf-8", "replace")))


def _make_version_spans(generation: Generation) -> list[wire.VersionSpan]:
    return [wire.VersionSpan(str(span.version), span.start, span.stop) for span in generation.spans]


def _make_usage(generation: Generation, reasoning: int | None = None) -> wire.UsageInfo:
    prompt, completion = len(generation.request.prompt), len(generation.tokens)
    return wire.UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=wire.PromptDetails(generation.cached_tokens),
        completion_tokens_details=None if reasoning is None else wire.CompletionDetails(reasoning),
    )


def _list_token_ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.id for token in tokens]


class ChatWriter:
    def __init__(self, generation: Generation, request: wire.ChatRequest, format: ReplyFormat) -> None:
        self._generation = generation
        self._format = format
        self._wants_logprobs = generation.reports_logprobs
        self._wants_token_ids = bool(request.return_token_ids)
        self._named_tool = isinstance(request.tool_choice, dict)
        self._parser = generation.output_parser
        self._reasoning_tokens = 0
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def write_start(self) -> bytes:
        chunk = self._make_chunk([wire.ChatChunkChoice(0, wire.Delta(role="assistant", content=""))])
        chunk.prompt_token_ids = self._generation.request.prompt.tolist() if self._wants_token_ids else None
        return sse.encode_event(encode_json(chunk))

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool) -> bytes:  # noqa: ARG002
        last = self._generation.finish_reason is not None
        choice = wire.ChatChunkChoice(
            0,
            self._make_delta(self._read_events(tokens, last)),
            self._format.make_text_logprobs(tokens) if self._wants_logprobs else None,
            token_ids=_list_token_ids(tokens) if self._wants_token_ids else None,
            weight_versions=self._format.label_versions(self._generation),
        )
        if last:
            choice.finish_reason = self._finish_reason(self._parser is not None and self._parser.calls > 0)
            choice.stop_reason = self._generation.stop_reason
        return sse.encode_event(encode_json(self._make_chunk([choice])))

    def write_usage(self) -> bytes:
        chunk = self._make_chunk([])
        chunk.usage = self._make_usage()
        return sse.encode_event(encode_json(chunk))

    def write_reply(self) -> bytes:
        generation = self._generation
        message = self._make_message(self._read_events(generation.tokens, last=True))
        choice = wire.ChatChoice(
            0,
            message,
            self._format.make_text_logprobs(generation.tokens) if self._wants_logprobs else None,
            self._finish_reason(message.tool_calls is not UNSET),
            generation.stop_reason,
            _list_token_ids(generation.tokens) if self._wants_token_ids else None,
            weight_versions=self._format.label_versions(generation),
        )
        reply = wire.ChatReply(self._id, self._created, self._format.model, [choice], self._make_usage())
        reply.prompt_token_ids = generation.request.prompt.tolist() if self._wants_token_ids else None
        return encode_json(reply)

    def _make_chunk(self, choices: list[wire.ChatChunkChoice]) -> wire.ChatChunk:
        return wire.ChatChunk(self._id, self._created, self._format.model, choices)

    def _make_usage(self) -> wire.UsageInfo:
        return _make_usage(self._generation, None if self._parser is None else self._reasoning_tokens)

    def _finish_reason(self, has_calls: bool) -> str:
        reason = self._generation.finish_reason or "abort"
        return "tool_calls" if has_calls and reason == "stop" and not self._named_tool else reason

    def _read_events(self, tokens: Sequence[SampledToken], last: bool) -> list[ReplyEvent]:
        if self._parser is None:
            return [TextDelta("".join(token.text for token in tokens))]
        events: list[ReplyEvent] = []
        for token in tokens:
            reasons = self._parser.is_reasoning
            events += self._parser.feed(token.text)
            self._reasoning_tokens += reasons and self._parser.is_reasoning
        return events + self._parser.finish() if last else events

    def _make_delta(self, events: list[ReplyEvent]) -> wire.Delta:
        delta = wire.Delta()
        calls: list[wire.ToolCall] = []
        begun = self._parser.calls if self._parser is not None else 0
        index = begun - 1 - sum(isinstance(event, ToolCallStart) for event in events)
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

    def _make_message(self, events: list[ReplyEvent]) -> wire.Message:
        reasoning, text, calls = "", "", list[wire.ToolCall]()
        for event in events:
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
            text = "".join(token.text for token in self._generation.tokens).rpartition("</think>")[2]
            calls = []
        if calls and not text.strip():
            text = ""
        message = wire.Message(
            "assistant", text or None, reasoning=reasoning or None, reasoning_content=reasoning or None
        )
        if calls:
            message.tool_calls = calls
        return message


def _call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class CompletionWriter:
    def __init__(self, generation: Generation, request: wire.CompletionRequest, format: ReplyFormat) -> None:
        self._generation = generation
        self._format = format
        self._wants_logprobs = generation.reports_logprobs
        self._wants_token_ids = bool(request.return_token_ids)
        self._offset = 0
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def write_start(self) -> bytes:
        return b""

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool) -> bytes:
        last = self._generation.finish_reason is not None
        return sse.encode_event(encode_json(self._make_reply([self._make_choice(tokens, first, last)])))

    def write_usage(self) -> bytes:
        reply = self._make_reply([])
        reply.usage = _make_usage(self._generation)
        return sse.encode_event(encode_json(reply))

    def write_reply(self) -> bytes:
        reply = self._make_reply([self._make_choice(self._generation.tokens, first=True, last=True)])
        reply.usage = _make_usage(self._generation)
        return encode_json(reply)

    def _make_reply(self, choices: list[wire.CompletionChoice]) -> wire.CompletionReply:
        return wire.CompletionReply(self._id, self._created, self._format.model, choices)

    def _make_choice(self, tokens: Sequence[SampledToken], first: bool, last: bool) -> wire.CompletionChoice:
        generation = self._generation
        return wire.CompletionChoice(
            0,
            "".join(token.text for token in tokens),
            self._make_logprobs(tokens) if self._wants_logprobs else None,
            generation.finish_reason if last else None,
            generation.stop_reason if last else None,
            token_ids=_list_token_ids(tokens) if self._wants_token_ids else None,
            prompt_token_ids=generation.request.prompt.tolist() if self._wants_token_ids and first else None,
            weight_versions=self._format.label_versions(generation),
        )

    def _make_logprobs(self, tokens: Sequence[SampledToken]) -> wire.CompletionLogprobs:
        out = wire.CompletionLogprobs()
        decode = self._format.tokenizer.decode_token
        for token in tokens:
            if token.logprob is None:
                continue
            text = decode(token.id)
            out.text_offset.append(self._offset)
            out.token_logprobs.append(token.logprob)
            out.tokens.append(text)
            others = token.alternatives or [(token.id, token.logprob)]
            out.top_logprobs.append({decode(id): value for id, value in others})
            self._offset += len(text)
        return out


class GenerateWriter:
    def __init__(self, generation: Generation, request: wire.GenerateRequest, format: ReplyFormat) -> None:
        self._generation = generation
        self._format = format
        self._wants_logprobs = generation.reports_logprobs
        self._wants_prompt_ids = bool(request.return_token_ids)
        self._id = request.request_id or secrets.token_hex(16)

    def write_start(self) -> bytes:
        return b""

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool) -> bytes:
        last = self._generation.finish_reason is not None
        chunk = wire.GenerateChunk(self._id, [self._make_choice(tokens, last)])
        if first and self._wants_prompt_ids:
            chunk.prompt_token_ids = self._generation.request.prompt.tolist()
        return sse.encode_event(encode_json(chunk))

    def write_usage(self) -> bytes:
        return sse.encode_event(encode_json(wire.GenerateChunk(self._id, [], _make_usage(self._generation))))

    def write_reply(self) -> bytes:
        choice = self._make_choice(self._generation.tokens, last=True)
        usage = _make_usage(self._generation)
        reply = wire.GenerateReply(self._id, self._format.model, int(time.time()), usage, [choice])
        if self._wants_prompt_ids:
            reply.prompt_token_ids = self._generation.request.prompt.tolist()
        return encode_json(reply)

    def _make_choice(self, tokens: Sequence[SampledToken], last: bool) -> wire.GenerateChoice:
        generation = self._generation
        logprobs = wire.IdLogprobs(
            [_make_id_logprob(token, token.logprob) for token in tokens if token.logprob is not None]
        )
        choice = wire.GenerateChoice(
            0, None, None, _list_token_ids(tokens), logprobs if self._wants_logprobs else None, weight_versions=None
        )
        if last or self._format.labels_every_chunk:
            choice.weight_versions = _make_version_spans(generation)
        if last:
            choice.finish_reason, choice.stop_reason = generation.finish_reason, generation.stop_reason
            choice.routed_experts = generation.routed_experts
        return choice


def _make_id_logprob(token: SampledToken, logprob: float) -> wire.IdLogprob:
    """The sampled token's rank is known where it is among the alternatives."""
    ranks = {id: rank for rank, (id, _) in enumerate(token.alternatives, 1)}
    top = [wire.IdLogprob(id, value, ranks[id]) for id, value in token.alternatives]
    rank = ranks.get(token.id)
    return wire.IdLogprob(token.id, logprob, rank, top or [wire.IdLogprob(token.id, logprob, rank)])

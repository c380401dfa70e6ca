"""How vLLM's three generating routes write a reply, whole or as a stream. The scripted engine has the same shapes."""

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from polar.dialects import sse
from polar.engines.embedded.generation import Generation, SampledToken
from polar.engines.embedded.request_reader import ChatRequest, CompletionRequest, GenerateRequest
from polar.engines.scripted import wire
from polar.rendering.tokenizer import Tokenizer

DONE = sse.encode_event(b"[DONE]")
_encode = msgspec.json.Encoder().encode


class ReplyWriter(Protocol):
    """Writes one reply. A stream is `begin`, `step` for each step, `usage` if asked for, and DONE. A step is written
    before anything more is sampled: it says how the generation stands."""

    def write_start(self) -> bytes: ...

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool, last: bool) -> bytes: ...

    def write_usage(self) -> bytes: ...

    def write_reply(self) -> bytes: ...


def _usage(generation: Generation) -> wire.UsageInfo:
    prompt, completion = len(generation.request.prompt), len(generation.tokens)
    return wire.UsageInfo(prompt, prompt + completion, completion, wire.PromptDetails(0))


def _versions(generation: Generation) -> list[wire.VersionSpan]:
    """With every chunk, of all tokens so far: a stream may break off behind any of them."""
    return [wire.VersionSpan(str(span.version), span.start, span.stop) for span in generation.spans]


class GenerateWriter:
    def __init__(self, generation: Generation, model: str, request: GenerateRequest) -> None:
        self._generation = generation
        self._model = model
        self._wants_logprobs = request.sampling_params.logprobs is not None
        self._prompt = generation.request.prompt if request.return_token_ids else None
        self._id = secrets.token_hex(16)

    def write_start(self) -> bytes:
        return b""

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool, last: bool) -> bytes:
        chunk = wire.GenerateChunk(self._id, [self._choice(tokens, last)])
        if first and self._prompt is not None:
            chunk.prompt_token_ids = self._prompt
        return sse.encode_event(_encode(chunk))

    def write_usage(self) -> bytes:
        return sse.encode_event(_encode(wire.GenerateChunk(self._id, [], _usage(self._generation))))

    def write_reply(self) -> bytes:
        choice = self._choice(self._generation.tokens, last=True)
        usage = _usage(self._generation)
        reply = wire.GenerateReply(self._id, self._model, int(time.time()), usage, [choice])
        reply.prompt_token_ids = self._prompt
        return _encode(reply)

    def _choice(self, tokens: Sequence[SampledToken], last: bool) -> wire.GenerateChoice:
        ids = [token.id for token in tokens]
        logprobs = wire.IdLogprobs([_id_logprob(token) for token in tokens]) if self._wants_logprobs else None
        choice = wire.GenerateChoice(0, None, None, ids, logprobs, _versions(self._generation))
        if last:
            choice.finish_reason = self._generation.finish_reason
            choice.stop_reason = self._generation.stop_reason
        return choice


def _id_logprob(token: SampledToken) -> wire.IdLogprob:
    others = [wire.IdLogprob(id, value, rank) for rank, (id, value) in enumerate(token.alternatives, 1)]
    return wire.IdLogprob(token.id, token.logprob, None, others)


class CompletionWriter:
    def __init__(self, generation: Generation, model: str, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._model = model
        self._tokenizer = tokenizer
        self._wants_logprobs = request.logprobs is not None
        self._wants_ids = request.return_token_ids
        self._offset = 0
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def write_start(self) -> bytes:
        return b""

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool, last: bool) -> bytes:
        return sse.encode_event(_encode(self._reply([self._choice(tokens, first, last)])))

    def write_usage(self) -> bytes:
        reply = self._reply([])
        reply.usage = _usage(self._generation)
        return sse.encode_event(_encode(reply))

    def write_reply(self) -> bytes:
        reply = self._reply([self._choice(self._generation.tokens, first=True, last=True)])
        reply.usage = _usage(self._generation)
        return _encode(reply)

    def _reply(self, choices: list[wire.CompletionChoice]) -> wire.CompletionReply:
        return wire.CompletionReply(self._id, self._created, self._model, choices)

    def _choice(self, tokens: Sequence[SampledToken], first: bool, last: bool) -> wire.CompletionChoice:
        generation = self._generation
        return wire.CompletionChoice(
            0,
            "".join(token.text for token in tokens),
            self._logprobs(tokens) if self._wants_logprobs else None,
            generation.finish_reason if last else None,
            generation.stop_reason if last else None,
            token_ids=[token.id for token in tokens] if self._wants_ids else None,
            prompt_token_ids=generation.request.prompt if self._wants_ids and first else None,
            weight_versions=_versions(generation),
        )

    def _logprobs(self, tokens: Sequence[SampledToken]) -> wire.CompletionLogprobs:
        out = wire.CompletionLogprobs()
        for token in tokens:
            text = self._tokenizer.decode_token(token.id)
            out.text_offset.append(self._offset)
            out.token_logprobs.append(token.logprob)
            out.tokens.append(text)
            others = token.alternatives or [(token.id, token.logprob)]
            out.top_logprobs.append({self._tokenizer.decode_token(id): value for id, value in others})
            self._offset += len(text)
        return out


class ChatWriter:
    """Replies are text: no calls are read out of it, since the gateway does that for ids."""

    def __init__(self, generation: Generation, model: str, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._model = model
        self._tokenizer = tokenizer
        self._wants_logprobs = bool(request.logprobs)
        self._wants_ids = request.return_token_ids
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def write_start(self) -> bytes:
        choice = wire.ChatChunkChoice(0, wire.Delta(role="assistant", content=""))
        chunk = self._chunk([choice])
        if self._wants_ids:
            chunk.prompt_token_ids = self._generation.request.prompt
        return sse.encode_event(_encode(chunk))

    def write_step(self, tokens: Sequence[SampledToken], *, first: bool, last: bool) -> bytes:  # noqa: ARG002
        choice = wire.ChatChunkChoice(
            0,
            wire.Delta(content="".join(token.text for token in tokens)),
            self._logprobs(tokens),
            token_ids=[token.id for token in tokens] if self._wants_ids else None,
            weight_versions=_versions(self._generation),
        )
        if last:
            choice.finish_reason, choice.stop_reason = self._generation.finish_reason, self._generation.stop_reason
        return sse.encode_event(_encode(self._chunk([choice])))

    def write_usage(self) -> bytes:
        chunk = self._chunk([])
        chunk.usage = _usage(self._generation)
        return sse.encode_event(_encode(chunk))

    def write_reply(self) -> bytes:
        generation = self._generation
        choice = wire.ChatChoice(
            0,
            wire.Message("assistant", "".join(token.text for token in generation.tokens)),
            self._logprobs(generation.tokens),
            generation.finish_reason or "abort",
            generation.stop_reason,
            [token.id for token in generation.tokens] if self._wants_ids else None,
            weight_versions=_versions(generation),
        )
        reply = wire.ChatReply(self._id, self._created, self._model, [choice], _usage(generation))
        reply.prompt_token_ids = generation.request.prompt if self._wants_ids else None
        return _encode(reply)

    def _chunk(self, choices: list[wire.ChatChunkChoice]) -> wire.ChatChunk:
        return wire.ChatChunk(self._id, self._created, self._model, choices)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> wire.TextLogprobs | None:
        if not self._wants_logprobs:
            return None
        content = []
        for token in tokens:
            entry = self._entry(token.id, token.logprob)
            entry.top_logprobs = [self._entry(id, value) for id, value in token.alternatives]
            content.append(entry)
        return wire.TextLogprobs(content)

    def _entry(self, id: int, logprob: float) -> wire.TextLogprob:
        text = self._tokenizer.decode_token(id)
        return wire.TextLogprob(text, logprob, list(text.encode("utf-8", "replace")))

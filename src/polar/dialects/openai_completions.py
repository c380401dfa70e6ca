"""OpenAI's legacy Completions: a raw prompt, as text or as token ids, is continued.

Nothing is rendered and nothing parsed, so a reply is text only. One call takes one prompt: a batch
would be several samplings.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from polar import ids
from polar.dialects import raw_fields, sse
from polar.dialects.base import EncodedError, Route, StreamEncoder
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_chat import wire as w
from polar.dialects.openai_chat.replies import encode_error, encode_error_body
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import Reply, ReplyEvent, Request, Text, TextDelta, TokenLogprob, Usage

TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Prompt: TypeAlias = str | list[TokenId | str | list[TokenId]]

DEFAULT_MAX_TOKENS = 16
"""What this API promises where the client names no limit; chats have none."""


class CompletionRequest(w.SamplingFields, kw_only=True):
    prompt: Prompt | None = None
    logprobs: w.Count | None = None


class CompletionLogprobs(Struct):
    """Columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


_REQUEST = msgspec.json.Decoder(CompletionRequest)
_COMPLETION = msgspec.json.Decoder(w.Completion[CompletionChoice])

_UNSUPPORTED_FIELDS = {
    **w.UNSUPPORTED_FIELDS,
    "suffix": ((None, ""), "the model writes on, it doesn't fill in"),
    "echo": ((None, False), "a reply holds what was sampled, not the prompt"),
    "response_format": ((None, {"type": "text"}), "only chats are constrained"),
}


class OpenAICompletions:
    name = "openai_completions"
    routes: tuple[Route, ...] = (Route("POST", re.compile(r"^/v1/completions$"), "generate"),)

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:  # noqa: ARG002
        return path.startswith("/v1/completions")

    def split(self, body: bytes) -> RawRequest:
        """No list grows from turn to turn here: a prompt stays one field, whatever its form."""
        return raw_fields.split(body, "messages")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:  # noqa: ARG002
        fields = w.decode_fields(_REQUEST, raw_request)
        w.refuse_fields(raw_request, _UNSUPPORTED_FIELDS)
        if not fields.model:
            raise ApiError("invalid_request", "`model` is required.", param="model")
        sampling = fields.decode_sampling()
        if sampling.max_tokens is None:
            sampling.max_tokens = DEFAULT_MAX_TOKENS
        return Request(
            model=fields.model,
            messages=[],
            sampling=sampling,
            stream=bool(fields.stream),
            stream_usage=fields.includes_usage(),
            logprobs=fields.logprobs,
            prompt=_decode_prompt(fields.prompt),
        )

    def encode_request(self, request: Request) -> bytes:
        if request.prompt is None:
            raise ApiError("unsupported", "The completions API takes no messages: use the chat API.", param="messages")
        prompt: Prompt = request.prompt if isinstance(request.prompt, str) else [*request.prompt]
        out = CompletionRequest(model=request.model, prompt=prompt, logprobs=request.logprobs)
        out.encode_sampling(request)
        return raw_fields.encode(out)

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        text = "".join([part.text for part in reply.parts if isinstance(part, Text)])
        choice = CompletionChoice(0, text, _encode_logprobs(request, reply), w.WIRE_FINISH_REASONS[reply.finish_reason])
        if reply.stop_sequence is not None:
            choice.stop_reason = reply.stop_sequence
        completion = w.Completion(
            id=f"cmpl-{reply.exchange_id}",
            object="text_completion",
            created=reply.created,
            model=reply.model,
            choices=[choice],
            usage=w.encode_usage(reply.usage),
        )
        return raw_fields.encode(completion)

    def decode_reply(self, body: bytes) -> Reply:
        completion = w.decode_completion(_COMPLETION, body)
        choice = completion.choices[0]
        return Reply(
            exchange_id=ids.find_exchange_id(completion.id) or completion.id,
            model=completion.model,
            created=completion.created,
            parts=[Text(choice.text)] if choice.text else [],
            finish_reason=w.decode_finish_reason(choice.finish_reason),
            stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            usage=w.decode_usage(completion.usage),
            logprobs=None if choice.logprobs is None else _decode_logprobs(choice.logprobs),
        )

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> StreamEncoder:
        return CompletionStreamEncoder(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        return OpenAIChat().encode_count(tokens)

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        return OpenAIChat().encode_models(models, model)

    def encode_error(self, error: ApiError) -> EncodedError:
        return encode_error(error)


class CompletionStreamEncoder:
    """A chunk per piece of text. Events that are no text can't come of a raw prompt, and have no place here."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, exchange_id: str, created: int) -> None:
        self._request = request
        self._chunk_start = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            raw_fields.encode(f"cmpl-{exchange_id}"),
            created,
            raw_fields.encode(request.model),
        )
        # With usage asked for, every chunk but the last says that it has none.
        self._chunk_end = b'],"usage":null}\n\n' if request.stream_usage else b"]}\n\n"
        self._text_start = self._chunk_start + b'{"index":0,"text":'
        self._text_end = b',"logprobs":null,"finish_reason":null}' + self._chunk_end

    def start(self, usage: Usage | None) -> bytes:  # noqa: ARG002
        return b""

    def feed(self, event: ReplyEvent) -> bytes:
        if isinstance(event, TextDelta) and event.text:
            return self._text_start + raw_fields.encode(event.text) + self._text_end
        return b""

    def finish(self, reply: Reply) -> bytes:
        logprobs = _encode_logprobs(self._request, reply)
        choice = CompletionChoice(0, "", logprobs, w.WIRE_FINISH_REASONS[reply.finish_reason])
        if reply.stop_sequence is not None:
            choice.stop_reason = reply.stop_sequence
        last = self._chunk_start + raw_fields.encode(choice) + self._chunk_end
        if self._request.stream_usage:
            last += self._chunk_start + b'],"usage":' + raw_fields.encode(w.encode_usage(reply.usage)) + b"}\n\n"
        return last + sse.encode_event(b"[DONE]")

    def error(self, error: ApiError) -> bytes:
        """No [DONE] after it: a client that overlooks the error must not take the text for whole."""
        return sse.encode_event(encode_error_body(error))

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT


def _decode_prompt(prompt: Prompt | None) -> str | list[int]:
    if prompt is None:
        raise ApiError("invalid_request", "`prompt` is required.", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise ApiError("invalid_request", "`prompt` is an empty list.", param="prompt")
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    if len(token_ids) == len(prompt):
        return token_ids
    first = prompt[0]
    if len(prompt) > 1 or isinstance(first, int):
        raise ApiError(
            "invalid_request",
            f"`prompt` holds {len(prompt)} prompts, and one call samples one reply; send a call for each.",
            param="prompt",
        )
    if not first and not isinstance(first, str):
        raise ApiError("invalid_request", "`prompt` is an empty list.", param="prompt")
    return first


def _encode_logprobs(request: Request, reply: Reply) -> CompletionLogprobs | None:
    """Only where the harness asked. In a stream all stand in the last chunk, since events and tokens don't line up."""
    if request.logprobs is None or reply.logprobs is None:
        return None
    out = CompletionLogprobs([], [], [] if request.logprobs else None, [])
    offset = 0
    for found in reply.logprobs:
        out.tokens.append(found.token)
        out.token_logprobs.append(w.clamp_logprob(found.logprob))
        if out.top_logprobs is not None:
            out.top_logprobs.append({other.token: w.clamp_logprob(other.logprob) for other in found.top_logprobs})
        if out.text_offset is not None:
            out.text_offset.append(offset)
        offset += len(found.token)
    return out


def _decode_logprobs(logprobs: CompletionLogprobs) -> list[TokenLogprob]:
    """A token without a log-probability is the prompt's first, which nothing was sampled before."""
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return [
        TokenLogprob(token, logprob, top_logprobs=[TokenLogprob(*other) for other in (top or {}).items()])
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=False)
        if logprob is not None
    ]

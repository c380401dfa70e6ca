"""OpenAI's Responses API, as codex and others speak it.

Nothing is kept between calls: what refers to a stored response, conversation or item is refused. Every id and seal of
a reply carries the exchange's id, and a stream's last event holds the same `response` as the whole reply to the same
turn.
"""

import re
from collections.abc import Mapping

from polar.dialects import raw_fields
from polar.dialects.base import EncodedError, Route, StreamEncoder
from polar.dialects.openai_chat.replies import encode_error
from polar.dialects.openai_responses import wire as w
from polar.dialects.openai_responses.replies import ResponsesStreamEncoder, decode_reply, encode_reply
from polar.dialects.openai_responses.requests import build_request, decode_request
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    Reply,
    Request,
)


class OpenAIResponses:
    name = "openai_responses"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/responses$"), "generate"),
        Route("POST", re.compile(r"^/v1/responses/input_tokens$"), "count_tokens"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:  # noqa: ARG002
        return path.startswith("/v1/responses")

    def split(self, body: bytes) -> RawRequest:
        return raw_fields.split(body, "input")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:  # noqa: ARG002
        return decode_request(raw_request)

    def encode_request(self, request: Request) -> bytes:
        return raw_fields.encode(build_request(request))

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        return encode_reply(request, reply)

    def decode_reply(self, body: bytes) -> Reply:
        return decode_reply(body)

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> StreamEncoder:
        return ResponsesStreamEncoder(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        return raw_fields.encode(w.InputTokens(tokens))

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return raw_fields.encode(w.Model(model))
        return raw_fields.encode(w.ModelList([w.Model(name) for name in models]))

    def encode_error(self, error: ApiError) -> EncodedError:
        return encode_error(error)

"""OpenAI's Chat Completions, as harnesses speak it and as vLLM and SGLang serve it.

What the wire can't say: a message has its reasoning first, then its text, then its calls, in whatever order the model
wrote them; reasoning has no seal; a tool result has no error flag, so the text of a failed call goes out as it is, with
nothing put in front of it. Reasoning, which OpenAI itself never shows, travels as `reasoning_content`.
"""

import re
from collections.abc import Mapping

from polar.dialects import raw_fields
from polar.dialects.base import EncodedError, Route, StreamEncoder
from polar.dialects.openai_chat import wire as w
from polar.dialects.openai_chat.replies import ChatStreamEncoder, build_reply, decode_reply, encode_error
from polar.dialects.openai_chat.requests import build_request, decode_request
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    Reply,
    Request,
)


class OpenAIChat:
    name = "openai_chat"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/chat/completions$"), "generate"),
        Route("GET", re.compile(r"^/v1/models$"), "list_models"),
        Route("GET", re.compile(r"^/v1/models/(?P<model>.+)$"), "get_model"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """A bearer token is OpenAI's way to carry a key; a client may also carry it in the path, and send none."""
        return path.startswith(("/v1/chat/", "/v1/models")) or headers.get("Authorization", "").startswith("Bearer ")

    def split(self, body: bytes) -> RawRequest:
        return raw_fields.split(body, "messages")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:  # noqa: ARG002
        return decode_request(raw_request)

    def encode_request(self, request: Request) -> bytes:
        return raw_fields.encode(build_request(request))

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        return raw_fields.encode(build_reply(request, reply))

    def decode_reply(self, body: bytes) -> Reply:
        return decode_reply(body)

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> StreamEncoder:
        return ChatStreamEncoder(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        """OpenAI has no such call for chats (no route leads here); the words are those of its Responses API."""
        return raw_fields.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return raw_fields.encode(_encode_model(model))
        return raw_fields.encode(w.ModelList("list", [_encode_model(name) for name in models]))

    def encode_error(self, error: ApiError) -> EncodedError:
        return encode_error(error)


def _encode_model(name: str) -> w.Model:
    return w.Model(name, "model", 0, "polar")

"""Anthropic's Messages API.

Two things set this dialect apart. A user message may mix tool results with text, so that one wire message can become
several canonical ones. And the provider edits the conversation on its side (deferred tools, system messages that
expire): what such a rule hides from the model is left out here, too.

Request fields:
  used      model, messages, system, max_tokens, stream, temperature, top_p, top_k, stop_sequences, tools, tool_choice,
            thinking, output_config (effort, format), output_format
  refused   what only Anthropic's servers can do and the model would notice: mcp_servers, thread, compaction, skills in
            a container, output_config.task_budget, thinking between_tools, max_tokens 0, server-side content blocks
  harmless  everything else, with one choice to know of: `context_management` asks the server to clear old tool results
            or thinking from its own copy once the context has grown. The history is passed on as it was sent, and the
            usage reported is that of the whole history, so that the harness's own accounting stays right.
"""

import math
import re
from collections.abc import Mapping

from polar.dialects.anthropic import wire as aw
from polar.dialects.anthropic.replies import AnthropicStreamEncoder, build_reply, decode_reply, encode_error_body
from polar.dialects.anthropic.requests import build_request, decode_request, require_utf8
from polar.dialects.base import EncodedError, Route
from polar.dialects.raw_fields import encode, split
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind
from polar.records.exchange import RawRequest
from polar.types import (
    Reply,
    Request,
)

_STATUS: dict[ApiErrorKind, int] = {
    **HTTP_STATUS,
    "overloaded": 529,
    "engine": 500,  # harnesses retry it as they do 529, and it does not claim that there is too much to do
}


class Anthropic:
    name = "anthropic"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/messages$"), "generate"),
        Route("POST", re.compile(r"^/v1/messages/(?P<verb>count_tokens)$"), "count_tokens"),
        Route("GET", re.compile(r"^/v1/models$"), "list_models"),
        Route("GET", re.compile(r"^/v1/models/(?P<model>.+)$"), "get_model"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """Every client of Anthropic's names the version of the API; the paths of the model list are OpenAI's, too."""
        return path.startswith("/v1/messages") or "anthropic-version" in headers

    def split(self, body: bytes) -> RawRequest:
        require_utf8(body)
        return split(body, "messages")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:
        return decode_request(raw_request, params)

    def encode_request(self, request: Request) -> bytes:
        return encode(build_request(request))

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        return encode(build_reply(request, reply))

    def decode_reply(self, body: bytes) -> Reply:
        return decode_reply(body)

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> AnthropicStreamEncoder:  # noqa: ARG002
        return AnthropicStreamEncoder(request, exchange_id)

    def encode_count(self, tokens: int) -> bytes:
        return encode(aw.TokenCount(tokens))

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return encode(aw.ModelInfo(model, model))
        listed = [aw.ModelInfo(name, name) for name in models]
        return encode(aw.ModelList(listed, models[0] if models else None, models[-1] if models else None))

    def encode_error(self, error: ApiError) -> EncodedError:
        headers = {"content-type": "application/json"}
        if error.retry_after is not None:
            headers["retry-after"] = str(max(0, math.ceil(error.retry_after)))
        return EncodedError(_STATUS[error.kind], encode_error_body(error), headers)

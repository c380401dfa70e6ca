"""Google's generateContent: the API of Gemini, as gemini-cli and pi speak it.

What makes it unlike the others:

- The path's verb says whether to stream, `?alt=sse` how: as server-sent events, or else as one JSON array, piece by
  piece. The form travels in `Request.echo["alt"]`, and the stream's encoder says its own `content_type`.
- Calls and results need no ids, and some harnesses drop those that we sent. Results are paired with calls by id, else
  by name, else by order; ids that are missing are made from what is there, the same ones on every turn.
- A thought's signature sits on whatever part comes after the thinking: the first call, else the last text. It has to
  be base64. Ours holds the seal, so that a turn that lost its thoughts and ids still names its exchange. A signature
  on text has no place in the canonical form; it becomes the seal of the turn's thinking, which may be empty.
- Clients keep a stream's chunks as they came: text pieces side by side, even one content per chunk. In a model's turn,
  neighbouring contents and neighbouring text are therefore one.
- Arguments and results are JSON objects. Text travels inside one: `{"output": ...}` or `{"error": ...}` for a result.
  Arguments that are no JSON object go out as `{"__unparsed_arguments": text}`: the harness's own check of the arguments
  refuses the call, as it should, the model gets to see that, and on its way back the text is what it was. (Google's own
  finish reason for this, MALFORMED_FUNCTION_CALL, makes harnesses throw the turn away.)
"""

import re
from collections.abc import Mapping

from polar.dialects import raw_fields
from polar.dialects.base import EncodedError, Route
from polar.dialects.google import wire as gw
from polar.dialects.google.replies import GoogleStreamEncoder, build_reply, decode_reply, encode_error
from polar.dialects.google.requests import build_request, decode_request
from polar.dialects.raw_fields import encode
from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import (
    Reply,
    Request,
)

_MODELS = r"^/(?:v1|v1beta|v1alpha)/models"


class Google:
    name = "google"
    routes: tuple[Route, ...] = (
        Route(
            "POST", re.compile(_MODELS + "/(?P<model>.+):(?P<verb>generateContent|streamGenerateContent)$"), "generate"
        ),
        Route("POST", re.compile(_MODELS + "/(?P<model>.+):(?P<verb>countTokens)$"), "count_tokens"),
        Route("GET", re.compile(_MODELS + "$"), "list_models"),
        Route("GET", re.compile(_MODELS + "/(?P<model>.+)$"), "get_model"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """The newest clients ask under /v1, where the model list is also OpenAI's and Anthropic's: the key tells."""
        return (
            path.startswith(("/v1beta", "/v1alpha"))
            or path.endswith((":generateContent", ":streamGenerateContent", ":countTokens"))
            or "x-goog-api-key" in headers
        )

    def split(self, body: bytes) -> RawRequest:
        return raw_fields.split(body, "contents")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:
        return decode_request(raw_request, params)

    def encode_request(self, request: Request) -> bytes:
        return encode(build_request(request))

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        return encode(build_reply(request, reply))

    def decode_reply(self, body: bytes) -> Reply:
        return decode_reply(body)

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> GoogleStreamEncoder:
        return GoogleStreamEncoder(request, exchange_id, created)

    def encode_count(self, tokens: int) -> bytes:
        return encode(gw.TokenCount(tokens))

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return encode(_encode_model(model))
        return encode(gw.ModelList([_encode_model(name) for name in models]))

    def encode_error(self, error: ApiError) -> EncodedError:
        return encode_error(error)


def _encode_model(name: str) -> gw.Model:
    name = name.removeprefix("models/")
    return gw.Model(f"models/{name}", name)

"""A dialect: one provider's wire format, both ways, through the canonical form.

    harness bytes -> decode_request -> Request ... Reply -> encode_reply -> harness bytes          (a whole answer)
                                       Request ... Event* -> StreamEncoder -> harness bytes        (a stream)

A dialect holds no state between calls and never talks to an engine, a store or a clock. The other two directions,
`encode_request` and `decode_reply`, are the provider's client: with them any dialect can be translated into any other.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from polar.errors import ApiError
from polar.records.exchange import RawRequest
from polar.types import Reply, ReplyEvent, Request, Usage

RouteOperation = Literal["generate", "count_tokens", "list_models", "get_model"]


class Route(NamedTuple):
    """A path that a dialect answers. Groups named `model` and `verb` are handed to it as `params`."""

    method: str
    path: re.Pattern[str]
    operation: RouteOperation


class EncodedError(Struct):
    """An error as the provider would send it."""

    status: int
    body: bytes
    headers: dict[str, str]


class StreamEncoder(Protocol):
    """Writes one streamed reply. Every method returns the bytes to send now, possibly none.

    Called as: start, feed*, then finish or error. `keep_alive` at any time, also before start.
    """

    content_type: str

    def start(self, usage: Usage | None) -> bytes: ...

    def feed(self, event: ReplyEvent) -> bytes: ...

    def finish(self, reply: Reply) -> bytes:
        """Closes the stream. `reply` is the whole turn, with its finish reason and usage."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Ends a stream that has begun, the way the provider does when it breaks midway."""
        ...

    def keep_alive(self) -> bytes: ...


class Dialect(Protocol):
    name: str
    routes: tuple[Route, ...]

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request looks like one of this provider's clients', also where no route of ours fits."""
        ...

    def split(self, body: bytes) -> RawRequest:
        """Raises ApiError("invalid_request") where the body is no JSON object."""
        ...

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request: ...

    def encode_request(self, request: Request) -> bytes: ...

    def encode_reply(self, request: Request, reply: Reply) -> bytes: ...

    def decode_reply(self, body: bytes) -> Reply: ...

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> StreamEncoder: ...

    def encode_count(self, tokens: int) -> bytes: ...

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        """The model list; with `model`, that one entry. Whatever name is asked for exists."""
        ...

    def encode_error(self, error: ApiError) -> EncodedError: ...


def join_namespace(namespace: str | None, name: str) -> str:
    """A tool's name where the wire format has no namespaces."""
    return f"{namespace}__{name}" if namespace else name

"""Splits a body into raw fields and decodes them one by one. Errors name the field at fault."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from polar.errors import ApiError
from polar.records.exchange import RawRequest

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ITEMS = msgspec.json.Decoder(list[Raw])
encode = msgspec.json.Encoder().encode
"""Python values and Structs to JSON bytes; Raw goes in as it is."""


def split(body: bytes, list_name: str) -> RawRequest:
    """The body's top-level fields, with the list `list_name` as raw items (no items where it is absent or not a
    list)."""
    try:
        if not body.isascii():
            body.decode()  # msgspec passes over the inside of strings in raw fields
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"The request body is not a JSON object: {error}.") from error
    except RecursionError as error:
        raise ApiError("invalid_request", "The request body is nested too deeply.") from error
    listed = fields.get(list_name)
    if listed is None or bytes(memoryview(listed)[:1]) != b"[":
        return RawRequest(fields, list_name, [])
    del fields[list_name]
    return RawRequest(fields, list_name, _ITEMS.decode(listed))


_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.")
"""A surrogate pair, half a pair, or any other escape (which is passed over, so that an escaped backslash is)."""


def replace_lone_surrogates(body: bytes) -> bytes:
    """JavaScript harnesses cut strings in the middle of a character, which no decoder takes: half a character becomes
    U+FFFD, as it does in browsers."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return _ESCAPE.sub(lambda escape: b"\\ufffd" if len(escape.group()) == 6 else escape.group(), body)


_decode_cache: ContextVar[dict[tuple[int, int], tuple[object, Any]] | None] = ContextVar("decoded", default=None)


@contextmanager
def cache_decoded_items() -> Iterator[None]:
    """Within, an item that several requests hold is decoded once: a session's requests repeat its history, as the very
    same objects where they come out of the store."""
    token = _decode_cache.set({})
    try:
        yield
    finally:
        _decode_cache.reset(token)


def decode(decoder: "msgspec.json.Decoder[T]", raw: Raw | bytes, where: str) -> T:
    """Decodes one field or item; an error says where in the request it stands. What comes out is not to be changed."""
    known = _decode_cache.get()
    if known is None:
        return _decode(decoder, raw, where)
    key = id(decoder), id(raw)
    if key not in known:
        known[key] = raw, _decode(decoder, raw, where)  # with the item, so that no other one gets its id
    found: T = known[key][1]
    return found


def get_decode_cache(maker: object) -> dict[int, tuple[Raw, Any]]:
    """What `maker` made of items, by id(item), for the caller to add to. Each entry holds its item, so that
    no other object gets that id. `maker` is what turns items into results, a function say; it lives as long as the
    process."""
    known = _decode_cache.get()
    if known is None:
        return {}
    made: dict[int, tuple[Raw, Any]] = known.setdefault((id(maker), 0), (maker, {}))[1]
    return made


def _decode(decoder: "msgspec.json.Decoder[T]", raw: Raw | bytes, where: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"{where}: {error}.", param=where) from error
    except RecursionError as error:
        raise ApiError("invalid_request", f"{where} is nested too deeply.", param=where) from error


def make_unsupported_field_error(field: str, why: str) -> ApiError:
    return ApiError("unsupported", f"`{field}` is not supported: {why}.", param=field)


def loads(text: str | bytes | Raw) -> Any:
    return msgspec.json.decode(text)

"""Splitting bodies."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects import raw_fields
from polar.errors import ApiError


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'"\ude00"', "\ufffd"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (r'"\\ud83d"', "\\ud83d"),
        (r'"\\\ud83d!"', "\\\ufffd!"),
        (r'"\uD83D \uDE00"', "\ufffd \ufffd"),
    ],
)
def test_half_a_character_becomes_a_replacement_character(sent: str, read: str) -> None:
    found = raw_fields.split(
        raw_fields.replace_lone_surrogates(f'{{"messages": [{sent}], "x": {sent}}}'.encode()), "messages"
    )
    assert raw_fields.loads(found.items[0]) == raw_fields.loads(found.fields["x"]) == read


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_whole_text_is_left_alone(text: str) -> None:
    body = json.dumps({"messages": [text]}).encode()
    assert raw_fields.replace_lone_surrogates(body) == body
    assert raw_fields.loads(raw_fields.split(body, "messages").items[0]) == text


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a": 1', b'{"a": "\xff"}', b"{" * 5000, b'{"a":' * 5000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        raw_fields.split(body, "messages")
    assert refused.value.kind == "invalid_request"

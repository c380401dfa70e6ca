"""Ids cut into text and markers."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.rendering.families.scanner import (
    END_MARKER,
    FoundMarker,
    Piece,
    Scanner,
    Vocabulary,
    join_pieces,
    split_at_marker,
)
from polar.rendering.tokenizer import Tokenizer
from tests.unit.rendering.families.models import model


def scan(tokenizer: Tokenizer, ids: list[int], *markers: str) -> list[Piece]:
    scanner = Scanner(Vocabulary(tokenizer, markers))
    pieces = [piece for id in ids for piece in scanner.feed([id])] + scanner.flush()
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize("name", ["scripted", "qwen3", "llama3_2", "deepseek_v3"])
@settings(deadline=None)  # reading a tokenizer takes a while
@given(st.data())
def test_the_text_is_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    """For any ids, whole characters or not."""
    tokenizer = model(name)
    control = set(tokenizer.added_tokens.values())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=12))
    ids = [id for id in ids if id not in control]
    assert join_pieces(scan(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None)  # reading a tokenizer takes a while
@given(st.text())
def test_the_text_of_a_tokenizer_with_byte_fallback(text: str) -> None:
    """Gemma's writes spaces as another character, and characters that it lacks as bytes."""
    tokenizer = model("gemma3")
    assert join_pieces(scan(tokenizer, tokenizer.encode(text), "<tool_call>")) == tokenizer.decode(
        tokenizer.encode(text)
    )


def test_a_token_is_a_marker_and_its_spelling_is_not() -> None:
    tokenizer = model("scripted")
    ids = [*tokenizer.encode("a<think>b"), *tokenizer.encode("<thi"), *tokenizer.encode("nk>")]
    assert scan(tokenizer, ids, "<think>") == ["a", FoundMarker("<think>"), "b<think>"]


def test_a_marker_that_is_no_token_is_found_in_the_text() -> None:
    tokenizer = model("scripted")
    ids = [id for part in ("x<fu", "nction=", "a><func", "tion") for id in tokenizer.encode(part)]
    assert scan(tokenizer, ids, "<function=", "=a>") == ["x", FoundMarker("<function=", is_token=False), "a><function"]


def test_only_what_may_become_a_marker_is_held_back() -> None:
    tokenizer = model("scripted")
    scanner = Scanner(Vocabulary(tokenizer, ["<call>"]))
    parts = ["a", "<", "c", "<", "c", "a", "l", "l", ">", "é"]
    fed = [join_pieces(scanner.feed(tokenizer.encode(part))) for part in parts]
    assert fed == ["a", "", "", "<c", "", "", "", "", "<call>", "é"]


def test_half_a_character_before_a_marker_is_given_out() -> None:
    tokenizer = model("scripted")
    half = tokenizer.token_to_id("ð") or 0
    assert scan(tokenizer, [half, *tokenizer.encode("<think>x")], "<think>") == ["�", FoundMarker("<think>"), "x"]
    assert scan(tokenizer, [half]) == ["�"]


def test_end_tokens_have_no_text_and_other_control_tokens_do() -> None:
    tokenizer = model("scripted")
    assert scan(tokenizer, tokenizer.encode("a<|im_end|>b<|im_start|>")) == ["a", END_MARKER, "b<|im_start|>"]


def test_a_space_before_a_word_is_kept() -> None:
    """Some tokenizers drop the first one when they decode; but what is sampled stands behind a prompt."""
    words = ["▁a", "▁Hi", "▁there", "!"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "!"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    assert backend.decode([1, 2, 3]) == "Hi there!"
    assert scan(Tokenizer(backend, {}, None), [1, 2, 3]) == [" Hi there!"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = model("scripted")
    assert scan(tokenizer, [tokenizer.vocabulary_size, -1]) == []


def test_cut() -> None:
    mark, other = FoundMarker("|"), FoundMarker("/")
    assert split_at_marker(["a", mark, "b", other, mark], "|") == [["a"], ["b", other], []]
    assert split_at_marker(["|"], "|") == [["|"]], "text is no marker"

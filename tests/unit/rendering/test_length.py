"""No text that is said not to fit a number of tokens encodes to so few."""

import json
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.encoder import PromptEncoder, TextBound
from polar.rendering.tokenizer import Tokenizer
from tests.selection import leave_to_slow
from tests.unit.rendering.families.models import REAL, small

FOLDERS = {file.parents[1].name: file.parent for file in sorted(REAL.glob("*/models/tokenizer.json"))}
FOLDERS["scripted"] = TOKENIZER_FOLDER
QUICK = [name for name in FOLDERS if not name.endswith(("gemma3", "deepseek_v3"))]
each_tokenizer = pytest.mark.parametrize("name", leave_to_slow(FOLDERS, but=QUICK))


@cache
def load(name: str) -> tuple[Tokenizer, TextBound]:
    tokenizer = Tokenizer.load(FOLDERS[name])
    return tokenizer, TextBound(json.loads(tokenizer.backend.to_str()))


PIECES = (
    *(" ", "\n", "\t", "a", "0", "-", "=", "_", "/", "é", "e\u0301", "\u1100\u1161\u11a8", "\u0344", "\u212b"),
    *("\u0f77", "\u0cc6\u0cc2\u0cd5", "\u03b1\u0313\u0300\u0345", "中", "🙂", "\ufeff", "\u200b", "\u3000", "<|", "|>"),
)


def fits(name: str, text: str) -> bool:
    tokenizer, bound = load(name)
    return bound.can_fit([text], len(tokenizer.encode(text)))


@each_tokenizer
def test_there_is_a_bound(name: str) -> None:
    _, bound = load(name)
    assert bound.bytes_per_token is not None
    assert not bound.can_fit(["word " * 1000], 10)


@each_tokenizer
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_texts_fit_their_own_tokens(name: str, data: st.DataObject) -> None:
    pieces = data.draw(
        st.lists(st.tuples(st.sampled_from(PIECES) | st.text(max_size=3), st.integers(1, 200)), max_size=8)
    )
    assert fits(name, "".join(piece * count for piece, count in pieces))


@each_tokenizer
def test_the_longest_tokens_fit(name: str) -> None:
    tokenizer, _ = load(name)
    texts = sorted((tokenizer.decode_token(id) for id in range(tokenizer.vocabulary_size)), key=len)[-40:]
    for text in texts:
        assert fits(name, text * 50)
    shuffled = [text for text in texts for _ in range(10)]
    random.Random(1).shuffle(shuffled)
    assert fits(name, "".join(shuffled))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"truncation": {"max_length": 5}},
    ],
)
def test_a_tokenizer_that_drops_text_has_no_bound(change: dict[str, object]) -> None:
    data = json.loads(load("scripted")[0].backend.to_str())
    bound = TextBound(data | change)
    assert bound.bytes_per_token is None
    assert bound.can_fit([" " * 1000], 1)


def test_a_control_token_that_takes_white_space_along_leaves_no_bound() -> None:
    data = json.loads(small(["<a>"], "<a>", "</s>").backend.to_str())
    data["added_tokens"][0]["rstrip"] = True
    assert TextBound(data).bytes_per_token is None


@pytest.mark.parametrize(
    "name", leave_to_slow(["scripted", "tokenizer-qwen3", "tokenizer-deepseek_v3"], but=["scripted", "tokenizer-qwen3"])
)
def test_the_scan_refuses_nothing_that_fits(name: str) -> None:
    """What is refused after encoding pieces of it has more tokens as a whole."""
    encoder = PromptEncoder(load(name)[0])
    for piece in ("word ", "ab", " ", "\n", "0", "中文", "🙂 ", "-" * 63 + "\n"):
        text = (piece * 120_000)[:120_000]
        tokens = len(encoder.encode(text))
        assert not encoder.exceeds_tokens(text, tokens)
        assert encoder.exceeds_tokens(text * 3, max(tokens // 8, 1)) or tokens < 12_000

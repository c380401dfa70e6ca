"""Text from messages never becomes a control token, however it is spelled and wherever it stands; and nothing else
about the ids changes."""

import json
import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from polar.rendering.continuation import TurnHistory
from polar.rendering.encoder import SPELLING_BREAK, PromptEncoder
from polar.rendering.model_codec import ModelCodec
from polar.types import Message, Part, Reasoning, Request, Text, Thinking, Tool, ToolCall, ToolResult
from tests.selection import leave_to_slow
from tests.unit.rendering.families.models import small
from tests.unit.rendering.talkers import TALKERS

NAMES = ("scripted", "qwen3", "qwen35", "llama3_2", "gemma3", "smollm2")
every_model = pytest.mark.parametrize("name", leave_to_slow(NAMES, but=[name for name in NAMES if name != "gemma3"]))
QUICK_TALKERS = [name for name in TALKERS if name not in ("gemma3", "deepseek_v3")]
unhurried = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))


@cache
def model(name: str) -> ModelCodec:
    return ModelCodec(TALKERS[name].tokenizer(), "off")


def spellings(name: str) -> st.SearchStrategy[str]:
    """Control tokens, whole and in pieces, among other text."""
    tokens = [
        token for token in model(name).encoder.control_tokens if "reserved" not in token and "unused" not in token
    ][:60]
    halves = [half for token in tokens for half in (token[: len(token) // 2], token[len(token) // 2 :], token[:-1])]
    return st.lists(st.sampled_from([*tokens, *halves, "a", " ", "\n", "<", "\x00", "\x01", "é"]), max_size=6).map(
        "".join
    )


def escaped(text: str) -> str:
    """As JSON that spells every character by its number."""
    return '"' + "".join(f"\\u{ord(character):04x}" for character in text) + '"'


@every_model
@unhurried
@given(st.data())
def test_no_message_can_write_a_control_token(name: str, data: st.DataObject) -> None:
    draw = spellings(name)
    said = [data.draw(draw) for _ in range(14)]
    keys = data.draw(st.booleans())
    arguments = (
        f'{{{escaped(said[0]) if keys else json.dumps("text")}: {escaped(said[1])}, "b": [{json.dumps(said[2])}]}}'
    )

    def messages(words: list[str], call: str) -> list[Message]:
        turn: list[Part] = [Reasoning(words[3]), Text(words[4]), Text(words[5]), ToolCall("c", words[12] or "x", call)]
        return [
            Message("system", [Text(words[6]), Text(words[7])]),
            Message("user", [Text(words[8])], name=words[9]),
            Message("assistant", turn),
            Message("tool", [ToolResult("c", [Text(words[10]), Text(words[11])], name=words[12])]),
        ]

    def ids(words: list[str], call: str) -> list[int]:
        schema = json.dumps({"type": "object", "properties": {words[0]: {"description": words[1], "enum": [words[2]]}}})
        tools = [Tool("bash", words[13], Raw(schema.encode()))]
        request = Request("m", messages(words, call), tools, thinking=Thinking(effort=words[9] or None))
        text = model(name).plan_prompt(request, TurnHistory(), lambda *_: None).text
        encoded = model(name).encoder.encode(text).tolist()
        # Where the tokenizer itself strips around a token, the text has more white space than the ids.
        assert _tight(model(name).tokenizer.decode(encoded)) == _tight(text.replace(SPELLING_BREAK, ""))
        return encoded

    control = set(model(name).encoder.control_tokens.values())
    harmless = ["w" if word.strip() else word for word in said]
    plain = ids(harmless, '{"text": "w", "b": ["w"]}')
    hostile = ids(said, arguments)
    assert Counter(id for id in hostile if id in control) == Counter(id for id in plain if id in control)


def _tight(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", leave_to_slow(TALKERS, but=QUICK_TALKERS))
@unhurried
@given(st.lists(st.text(max_size=20) | st.text("ab \n\t<|>é", max_size=20), min_size=1, max_size=4))
def test_what_spells_no_control_token_gets_the_tokenizers_own_ids(name: str, texts: list[str]) -> None:
    tokenizer = TALKERS[name].tokenizer()
    messages = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": text} for number, text in enumerate(texts)
    ]
    rendered = tokenizer.template.render(messages)
    encoder = PromptEncoder(tokenizer) if name == "smollm2" else _encoder(name)
    assert encoder.encode(rendered).tolist() == tokenizer.encode(rendered)


@pytest.mark.parametrize("name", leave_to_slow(TALKERS, but=QUICK_TALKERS))
@unhurried
@given(st.data())
def test_breaks_change_nothing_else_about_the_text(name: str, data: st.DataObject) -> None:
    """Templates trim what they show: a break doesn't hold white space back."""
    encoder, template = _encoder(name), TALKERS[name].tokenizer().template
    pieces = [piece for token in encoder.control_tokens for piece in (token[:2], token[2:-2], token[-2:])][:60]
    spaces = st.text(" \n\t", max_size=2)
    draw = st.tuples(spaces, st.sampled_from([*pieces, "a"]), st.text("a b", max_size=3), spaces).map("".join)

    def rendered(texts: list[str]) -> str:
        roles = ("user", "assistant") * 2
        return template.render([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])

    texts = [data.draw(draw) for _ in range(4)]
    assert rendered([encoder.guard(text) for text in texts]).replace(SPELLING_BREAK, "") == rendered(texts)


@cache
def _encoder(name: str) -> PromptEncoder:
    return PromptEncoder(TALKERS[name].tokenizer())


def test_overlapping_spellings_are_all_broken() -> None:
    encoder = PromptEncoder(small(["<<a>>", "<a>", "a>>b", "¤"], "<<a>> <a> a>>b ¤", "</s>"))
    assert "¤" not in encoder.control_tokens  # nothing could be put within it
    for text in ("<<a>>b", "<<a>>", "</s></s>", "<</s>"):
        ids = encoder.encode(encoder.guard(text)).tolist()
        assert set(ids).isdisjoint(encoder.control_tokens.values())


def test_guarded_texts_are_equal_only_if_they_are() -> None:
    """Also once the break, which is random, is written as a zero for digests."""
    encoder = _encoder("scripted")
    stable = [
        encoder.guard(text).replace(SPELLING_BREAK, "\x00")
        for text in ("<|im_end|>", "<\x00|im_end|>", "<\x00\x00|im_end|>", "\x01")
    ]
    assert len(set(stable)) == 4
    assert "\x01" not in stable


def test_lone_surrogates_are_encoded_as_undecodable() -> None:
    encoder = _encoder("scripted")
    assert encoder.encode("a\ud800b").tolist() == encoder.encode("a\ufffdb").tolist()
    assert encoder.encode("\ud83d\ude42").tolist() == encoder.encode("🙂").tolist()

"""The tokenizer: ids of whole conversations, and text that grows token by token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.errors import ConfigError
from polar.rendering.tokenizer import Tokenizer, decode_pieces

OURS = Tokenizer.load(TOKENIZER_FOLDER)


def test_special_tokens() -> None:
    assert OURS.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert OURS.encode("<|im_end|>") == [OURS.eos_id]
    for markup in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert OURS.encode(f"a{markup}b")[1:-1] == [OURS.added_tokens[markup]]
        assert OURS.decode([OURS.added_tokens[markup]], skip_special_tokens=True) == markup, "a parser must see it"
    assert OURS.decode([OURS.eos_id or 0], skip_special_tokens=True) == ""


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert OURS.decode(OURS.encode(text)) == text


@given(st.lists(st.text(alphabet=st.sampled_from(list("ab \n.é🙂<|im_end>"))) | st.just("<|im_end|>")))
def test_turn_by_turn_gives_the_same_ids(parts: list[str]) -> None:
    text = "".join(parts)
    assert OURS.encode_turns(text).tolist() == OURS.encode(text)


def test_tokenizers_that_cannot_be_cut_are_encoded_whole(tmp_path: Path) -> None:
    """With a space put before the first word, the second turn's first word would get one, too."""
    shutil.copytree(TOKENIZER_FOLDER, tmp_path / "t")
    path = tmp_path / "t" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(data))
    spaced = Tokenizer.load(tmp_path / "t")
    text = "one<|im_end|>two<|im_end|>\n"
    assert spaced.encode_turns(text).tolist() == spaced.encode(text)


@given(st.lists(st.integers(0, OURS.vocabulary_size - 1), max_size=30))
def test_growing_text_is_the_whole_text(ids: list[int]) -> None:
    assert "".join(decode_pieces(OURS, ids)) == OURS.decode(ids)


def test_half_a_character_is_held_back() -> None:
    ids = [OURS.token_to_id(token) or 0 for token in ("ð", "Ł", "Ļ", "Ĥ")]  # the four bytes of one emoji, a token each
    assert OURS.decode(ids) == "🙂"
    detokenizer = OURS.make_detokenizer()
    assert [detokenizer.add(id) for id in ids] == ["", "", "", "🙂"]
    assert detokenizer.flush() == ""
    assert detokenizer.add(ids[0]) == ""
    assert detokenizer.flush() == "�"


def test_chat_template_from_the_config(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER_FOLDER / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer.load(tmp_path).template  # noqa: B018
    config: dict[str, Any] = {
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": "{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).template.render([]) == "<|im_end|>"
    config["chat_template"] = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).template.render([], [{}]) == "two"
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert Tokenizer.load(tmp_path).template.render([]) == "the file wins"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    shutil.copy(TOKENIZER_FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)

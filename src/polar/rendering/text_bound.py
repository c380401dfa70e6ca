"""How long a text can be and still fit a context of so many tokens: what can't fit is refused before it is encoded.

A token stands for at most as many bytes of text as the vocabulary's longest entry has. That holds where every byte of a
text ends up in some token, so it depends on how the tokenizer normalises and cuts text. For one that may drop text, or
that fuses unknown characters, there is no such bound.
"""

from typing import Any

NFC_SHRINKAGE = 3
"""Composing characters shortens UTF-8 to a third at most (a Hangul syllable from its three letters); ASCII stays."""

_LOSSLESS_PRE_TOKENIZERS = frozenset(("ByteLevel", "Metaspace", "Digits"))
_NORMALIZERS_TO_NFC = frozenset(("NFC", "NFD"))


class TextBound:
    """The most text that one token can stand for, given the contents of a tokenizer.json."""

    def __init__(self, data: dict[str, Any]) -> None:
        strips = any(token["lstrip"] or token["rstrip"] for token in data["added_tokens"])
        covers = _covers_all(data) and not strips
        self.bytes_per_token = _longest_entry(data) if covers else None
        """None where a token may stand for any amount of text."""

    def can_fit(self, texts: list[str], tokens: int) -> bool:
        """Whether these texts may encode to so few tokens. False is certain; True is not."""
        if self.bytes_per_token is None:
            return True
        most = tokens * self.bytes_per_token
        size = 0
        for text in texts:
            size += len(text) if text.isascii() else _least_bytes(text)
            if size > most:
                return False
        return True


def _least_bytes(text: str) -> int:
    """Bytes of a text that are certainly left when it has been normalised."""
    total = len(text.encode("utf-8", "replace"))
    ascii_bytes = len(text.encode("ascii", "ignore"))
    return ascii_bytes + (total - ascii_bytes) // NFC_SHRINKAGE


def _longest_entry(data: dict[str, Any]) -> int:
    """In bytes of text. A byte-level vocabulary writes each byte as one character; other ones write text."""
    by_bytes = _is_byte_level(data)
    entries = (len(entry) if by_bytes else len(entry.encode()) for entry in data["model"]["vocab"])
    added = (len(token["content"].encode()) for token in data["added_tokens"])
    return max((*entries, *added), default=1)


def _covers_all(data: dict[str, Any]) -> bool:
    model = data["model"]
    return (
        model["type"] == "BPE"
        and data.get("truncation") is None
        and (_is_byte_level(data) or bool(model.get("byte_fallback")))
        and all(map(_keeps_text, _flatten_steps(data.get("normalizer"), "normalizers")))
        and all(map(_keeps_pieces, _flatten_steps(data.get("pre_tokenizer"), "pretokenizers")))
    )


def _is_byte_level(data: dict[str, Any]) -> bool:
    steps = _flatten_steps(data.get("pre_tokenizer"), "pretokenizers") + _flatten_steps(
        data.get("normalizer"), "normalizers"
    )
    return any(step["type"] == "ByteLevel" for step in steps)


def _flatten_steps(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for one in step[members] for inner in _flatten_steps(one, members)]
    return [step]


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer shortens text no further than NFC does."""
    kind = normalizer["type"]
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode())
    return kind in _NORMALIZERS_TO_NFC or kind in ("Prepend", "ByteLevel")


def _keeps_pieces(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _LOSSLESS_PRE_TOKENIZERS

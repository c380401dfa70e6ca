"""Sampled ids cut into text and markers.

A marker is a piece of a family's markup: `<think>`, `</tool_call>`, `[ARGS]`. Where the tokenizer has it as an added
token, only that token is the marker, and other tokens that spell it are text; where it hasn't, it is looked for in the
text, across the borders of tokens.

Invariant: the pieces, as spelled, are the text that the ids decode to, less the end tokens and apart from the ids that
still are within a character or a marker; and they don't depend on how the ids were cut into calls of `feed`.
"""

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from polar.rendering.tokenizer import Tokenizer

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
"""What ends a turn or a text, in the families that we know. Never text where it is an added token."""

_REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """A marker that was found: `token` says that it came as a token of its own."""

    text: str
    is_token: bool = True


Piece = str | FoundMarker


def join_pieces(pieces: Sequence[Piece]) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def split_at_marker(pieces: Sequence[Piece], marker: str) -> list[list[Piece]]:
    """What stands between the places where the marker was found."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        if isinstance(piece, FoundMarker) and piece.text == marker:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


END_MARKER = FoundMarker("")
"""An end token: it has no text."""


def _build_byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves, the others
    are counted on from 256."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTE_BY_CHARACTER = _build_byte_characters()


class Vocabulary:
    """What each id of a tokenizer is to a family: a marker, or the bytes of its text. Shared by all its scanners."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str], end_tokens: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.pieces_by_id: dict[int, bytes | FoundMarker] = {}
        for text in markers:
            if (id := tokenizer.added_tokens.get(text)) is not None:
                self.pieces_by_id[id] = FoundMarker(text)
        for text in (*END_TOKENS, *end_tokens, tokenizer.special_tokens.get("eos_token", "")):
            if (id := tokenizer.added_tokens.get(text)) is not None:
                self.pieces_by_id.setdefault(id, END_MARKER)
        # A token's text is what it adds behind another one: some decoders treat the first token of all differently.
        self._before = tokenizer.encode("a")[-1:]
        self._before_length = len(tokenizer.decode(self._before))
        self.text_markers = sorted(
            {text for text in markers if text not in tokenizer.added_tokens}, key=len, reverse=True
        )
        never = r"(?!)"
        self.marker_pattern = re.compile("|".join(map(re.escape, self.text_markers)) or never)
        self.first_character_pattern = re.compile("|".join({re.escape(text[0]) for text in self.text_markers}) or never)

    def look_up(self, id: int) -> bytes | FoundMarker:
        """Like `known[id]`, for an id that wasn't met yet."""
        piece = self.pieces_by_id[id] = self._bytes(id)
        return piece

    def _bytes(self, id: int) -> bytes:
        if not 0 <= id < self._tokenizer.vocabulary_size:
            return b""  # models have more ids than their tokenizers: padding that means nothing
        text = self._tokenizer.decode([*self._before, id])[self._before_length :]
        if _REPLACEMENT not in text:
            return text.encode()
        entry = self._tokenizer.id_to_token(id) or ""
        if byte := _BYTE_FALLBACK.fullmatch(entry):
            return bytes([int(byte.group(1), 16)])
        if all(character in _BYTE_BY_CHARACTER for character in entry):
            return bytes(_BYTE_BY_CHARACTER[character] for character in entry)
        return text.encode()


class Scanner:
    """The pieces of one growing sequence of ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known = vocabulary.pieces_by_id
        self._may_begin_marker = vocabulary.first_character_pattern.search
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that may be the beginning of a marker

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        known, decode = self._known, self._decoder.decode
        for id in ids:
            piece = known.get(id)
            if piece is None:
                piece = self._vocabulary.look_up(id)
            if not isinstance(piece, bytes):
                pieces += self.flush()
                pieces.append(piece)
            elif text := decode(piece):
                if self._held or self._may_begin_marker(text):
                    self._split_markers(self._held + text, pieces)
                else:
                    pieces.append(text)
        return pieces

    def flush(self) -> list[Piece]:
        """What is held back, given that nothing follows which could complete it."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return [text] if text else []

    def _split_markers(self, text: str, pieces: list[Piece]) -> None:
        start = 0
        for found in self._vocabulary.marker_pattern.finditer(text):
            if found.start() > start:
                pieces.append(text[start : found.start()])
            pieces.append(FoundMarker(found.group(), is_token=False))
            start = found.end()
        end = self._find_certain_end(text, start)
        if end > start:
            pieces.append(text[start:end])
        self._held = text[end:]

    def _find_certain_end(self, text: str, start: int) -> int:
        """Where the longest end of the text begins that may become a marker."""
        markers = self._vocabulary.text_markers
        for found in self._vocabulary.first_character_pattern.finditer(
            text, max(start, len(text) - len(markers[0]) + 1)
        ):
            if any(marker.startswith(text[found.start() :]) for marker in markers):
                return found.start()
        return len(text)

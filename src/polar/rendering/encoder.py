"""Rendered text to token ids, so that text from messages can never become control tokens.

A template writes control tokens as text, and anybody who writes a message can do so, too. The two are told apart before
rendering: where content spells a control token, `guard` breaks the spelling with a mark that no text has. After
rendering, every remaining spelling is the template's own; the spans in between are encoded as plain text. Texts that
are joined must be guarded as one text: two halves of a spelling are harmless only apart.

    content -> guard -> template -> rendered text -> split at control tokens -> ids

Invariant: for content without such spellings the ids are those of the tokenizer itself. A span is encoded once and
cached, so a conversation costs only its new text. `limit_new_text` bounds how much new text a block of code may guard
and encode, for callers that must not be kept busy.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers

from polar.errors import PolarError
from polar.records.exchange import TokenIds
from polar.rendering.memo import Memo
from polar.rendering.tokenizer import Tokenizer, encode_ids

_GUARD_CACHE_BYTES = _SPAN_CACHE_BYTES = 64 * 1024 * 1024
"""Sizes of the caches of guarded texts, and of spans of rendered text with their ids."""

_FIRST_SPAN_CACHE_BYTES = 8 * 1024 * 1024
"""Size of the cache of spans that begin a prompt, with their ids."""

_SCAN_PIECE_CHARACTERS = 32 * 1024
"""Size of the pieces that are encoded only to count a text's tokens."""

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token in tokenizer.json besides its id."""

_MAX_SET_LOOKUP_IDS = 1024
"""Up to so many ids, a Python set finds a control token faster than numpy."""

BREAK_PLACEHOLDER, TURN_PLACEHOLDER = "\x00", "\x01"
"""Stand for a break and for a turn in digests of rendered text (continuation.py). Content with these characters is
broken as well, so that it is never mistaken for either."""

SPELLING_BREAK = f"`{secrets.token_hex(8)}`"
"""Stands within a spelling that is only text. It is random, so that nobody can write it, has only characters that JSON
and HTML leave alone, and edges that no control token has."""


NFC_SHRINKAGE = 3
"""Composing characters shortens UTF-8 to a third at most (a Hangul syllable from its three letters); ASCII stays."""

_LOSSLESS_PRE_TOKENIZERS = frozenset(("ByteLevel", "Metaspace", "Digits"))
_NORMALIZERS_TO_NFC = frozenset(("NFC", "NFD"))


class NewTextLimitExceeded(PolarError):
    """A prompt has more new text than the caller allows."""


class _Allowance:
    def __init__(self, remaining_bytes: int) -> None:
        self.remaining_bytes = remaining_bytes


_allowance: ContextVar[_Allowance | None] = ContextVar("new_text_allowance", default=None)


@contextmanager
def limit_new_text(max_bytes: int) -> Iterator[None]:
    """Makes guarding and encoding raise NewTextLimitExceeded once more than `max_bytes` of text were not cached. Text
    that is both guarded and encoded counts twice."""
    token = _allowance.set(_Allowance(max_bytes))
    try:
        yield
    finally:
        _allowance.reset(token)


def _charge_new_text(text: str) -> None:
    allowance = _allowance.get()
    if allowance is not None:
        allowance.remaining_bytes -= count_utf8_bytes(text)
        if allowance.remaining_bytes < 0:
            raise NewTextLimitExceeded("The prompt has too much new text to be rendered here.")


def count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = _build_plain_text_encoder(tokenizer)
        self._plain, self._anchor = plain.backend, plain.anchor
        self.text_bound = plain.text_bound
        self.fingerprint = plain.fingerprint
        """Identifies the tokenizer: ids have a meaning only with the tokenizer that made them."""
        self.control_tokens = _collect_control_tokens(tokenizer)
        """Ids of the control tokens by their text."""
        self._pattern = re.compile(_build_pattern(self.control_tokens))
        self._splitter = re.compile(f"({self._pattern.pattern})")
        # One character at a time, since spellings can overlap.
        self._breakable_pattern = re.compile(
            f"(?={self._pattern.pattern}).|[{BREAK_PLACEHOLDER}{TURN_PLACEHOLDER}]", re.DOTALL
        )
        self._control_prefixes = {token[:cut] for token in self.control_tokens for cut in range(1, len(token))}
        self._control_suffixes = {token[cut:] for token in self.control_tokens for cut in range(1, len(token))}
        self._controls_are_trimmed = all(
            token == token.strip() for token in self.control_tokens
        )  # white space alone completes none
        self._longest = max(map(len, self.control_tokens), default=1)
        self._flags = {
            token.content: (token.lstrip, token.rstrip)
            for token in tokenizer.backend.get_added_tokens_decoder().values()
            if token.content in self.control_tokens and (token.lstrip or token.rstrip)
        }
        self._control_ids = np.array(list(self.control_tokens.values()), np.int32)
        self._guard_memo: Memo[str, str] = Memo(self._break_spellings, _GUARD_CACHE_BYTES, charge=_charge_new_text)
        self._first_span_memo: Memo[str, TokenIds] = Memo(
            self._encode_first, _FIRST_SPAN_CACHE_BYTES, charge=_charge_new_text
        )
        self._span_memo: Memo[str, TokenIds] = Memo(self._encode_span, _SPAN_CACHE_BYTES, charge=_charge_new_text)

    def guard(self, text: str) -> str:
        """Returns content with its spellings of control tokens broken, as it may go into a template."""
        return self._guard_memo(text)

    def encode(self, text: str, *, first: bool = True) -> TokenIds:
        """Encodes rendered text; `first` says that it begins the prompt."""
        pieces: list[TokenIds] = []
        for control, span in self._split(text):
            if control is not None:
                pieces.append(np.array([self.control_tokens[control]], np.int32))
            elif span:
                pieces.append(self._first_span_memo(span) if first and not pieces else self._span_memo(span))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def exceeds_tokens(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more tokens. Encodes it piece by piece until there are more than twice as many,
        since a cut between two pieces adds a few tokens. False proves nothing."""
        count = 0
        for start in range(0, len(text), _SCAN_PIECE_CHARACTERS):
            piece = text[start : start + _SCAN_PIECE_CHARACTERS].replace(SPELLING_BREAK, "")
            count += len(encode_ids(self._plain, _replace_surrogates(piece)))
            if count > 2 * tokens + _SCAN_PIECE_CHARACTERS // 16:
                return True
        return False

    def is_control_at(self, text: str, start: int) -> bool:
        return self._pattern.match(text, start) is not None

    def find_controls(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        return self._pattern.finditer(text, start)

    def _break_spellings(self, text: str) -> str:
        # A template may complete a spelling: '<function=' + name + '>'. It may trim the text first, so breaks stand
        # within the white space at the edges: trimming then has the same effect as without them.
        core = text.strip() if self._controls_are_trimmed else text
        leading, _, trailing = text.partition(core) if core else (text, "", "")
        lengths = range(1, self._longest)
        completes_start = any(edge[:length] in self._control_suffixes for edge in (text, core) for length in lengths)
        completes_end = any(edge[-length:] in self._control_prefixes for edge in (text, core) for length in lengths)
        start = SPELLING_BREAK if completes_start else ""
        end = SPELLING_BREAK if completes_end else ""
        if self._pattern.search(core) is not None or BREAK_PLACEHOLDER in core or TURN_PLACEHOLDER in core:
            core = self._breakable_pattern.sub(lambda match: match.group() + SPELLING_BREAK, core)
        if not start and core.strip() and any(core.strip() in token for token in self.control_tokens):
            start = SPELLING_BREAK  # ... on both sides: '<|' + name + '|>'
        guarded = leading + start + core + end + trailing
        return text if guarded == text else guarded  # mostly equal: keep one object instead of two

    def _split(self, text: str) -> Iterator[tuple[str | None, str]]:
        """Yields control tokens and the plain spans between them, in order."""
        pieces = self._splitter.split(text)
        strip_left = False
        for index, piece in enumerate(pieces):
            if index % 2:
                yield piece, ""
                strip_left = self._flags.get(piece, (False, False))[1]
            else:
                if strip_left:  # the token before swallows the white space behind it
                    piece = piece.lstrip()
                if index + 1 < len(pieces) and self._flags.get(pieces[index + 1], (False, False))[0]:
                    piece = piece.rstrip()
                yield None, piece

    def _encode_first(self, span: str) -> TokenIds:
        return self._encode_checked(span.replace(SPELLING_BREAK, ""), anchored=False)

    def _encode_span(self, span: str) -> TokenIds:
        return self._encode_checked(span.replace(SPELLING_BREAK, ""), anchored=self._anchor is not None)

    def _encode_checked(self, text: str, *, anchored: bool) -> TokenIds:
        text = _replace_surrogates(text)
        ids = encode_ids(self._plain, f"{self._anchor}{text}")[1:] if anchored else encode_ids(self._plain, text)
        array = np.asarray(ids, np.int32)
        if self._has_control(array) and (spelling := self._pattern.search(text)):
            # The vocabulary has the control token's text as an ordinary piece: cut the spelling in two.
            at = spelling.start() + 1
            second_half = self._encode_checked(text[at:], anchored=self._anchor is not None)
            return np.concatenate([self._encode_checked(text[:at], anchored=anchored), second_half])
        array.flags.writeable = False  # the cache shares it
        return array

    def _has_control(self, ids: TokenIds) -> bool:
        if len(ids) > _MAX_SET_LOOKUP_IDS:
            return bool(np.isin(ids, self._control_ids).any())
        return not set(ids.tolist()).isdisjoint(self.control_tokens.values())


def _collect_control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Collects special tokens and the added tokens that the template writes (`<think>`, `<tool_call>`). Other added
    tokens, such as runs of spaces and single characters, are ordinary text."""
    source = tokenizer.template_source
    return {
        token.content: id
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if len(token.content.strip()) > 1 and (token.special or token.content in source)
    }


def _build_pattern(words: Iterable[str]) -> str:
    """Builds a pattern that matches the longest of the words at a position. It branches by character, so that its cost
    does not grow with the number of words: some models have hundreds of control tokens that begin alike."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _build_branches(tree) or r"(?!)"


def _build_branches(node: dict[str, Any]) -> str:
    options = [re.escape(character) + _build_branches(child) for character, child in node.items() if character]
    if not options:
        return ""
    pattern = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return f"{pattern}?" if "" in node else pattern


def _replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON can spell and no tokenizer takes, by the replacement character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TextBound:
    """Bounds how long a text can be to fit a context of so many tokens: a longer one is refused before it is encoded.

    A token stands for at most as many bytes of text as the vocabulary's longest entry has. That holds if every byte of
    a text ends up in some token, so it depends on how the tokenizer normalises and splits text. A tokenizer that drops
    text or fuses unknown characters has no such bound. `data` is the content of a tokenizer.json."""

    def __init__(self, data: dict[str, Any]) -> None:
        strips = any(token["lstrip"] or token["rstrip"] for token in data["added_tokens"])
        covers = _covers_all_bytes(data) and not strips
        self.bytes_per_token = _measure_longest_entry(data) if covers else None
        """None if a token may stand for any amount of text."""

    def can_fit(self, texts: list[str], tokens: int) -> bool:
        """Whether these texts may fit into `tokens` tokens. Only False is certain."""
        if self.bytes_per_token is None:
            return True
        max_bytes = tokens * self.bytes_per_token
        size = 0
        for text in texts:
            size += len(text) if text.isascii() else _count_min_bytes(text)
            if size > max_bytes:
                return False
        return True


def _count_min_bytes(text: str) -> int:
    """Counts the bytes of a text that certainly remain when it is normalised."""
    total = len(text.encode("utf-8", "replace"))
    ascii_bytes = len(text.encode("ascii", "ignore"))
    return ascii_bytes + (total - ascii_bytes) // NFC_SHRINKAGE


def _measure_longest_entry(data: dict[str, Any]) -> int:
    """Returns the length of the vocabulary's longest entry in bytes of text. A byte-level vocabulary writes each byte
    as one character; others write text."""
    by_bytes = _is_byte_level(data)
    entries = (len(entry) if by_bytes else len(entry.encode()) for entry in data["model"]["vocab"])
    added = (len(token["content"].encode()) for token in data["added_tokens"])
    return max((*entries, *added), default=1)


def _covers_all_bytes(data: dict[str, Any]) -> bool:
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
        return [inner for member in step[members] for inner in _flatten_steps(member, members)]
    return [step]


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer shortens text no more than NFC does."""
    kind = normalizer["type"]
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"].encode()) >= len(replaced.encode())
    return kind in _NORMALIZERS_TO_NFC or kind in ("Prepend", "ByteLevel")


def _keeps_pieces(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _LOSSLESS_PRE_TOKENIZERS


class _PlainTextEncoder(NamedTuple):
    """A tokenizer without its control tokens."""

    backend: tokenizers.Tokenizer
    anchor: str | None
    """Text put before a span so that it is not encoded as a beginning; None if the tokenizer treats beginnings as any
    other text."""
    text_bound: TextBound
    fingerprint: bytes


@lru_cache(8)
def _build_plain_text_encoder(tokenizer: Tokenizer) -> _PlainTextEncoder:
    """Builds the tokenizer without control tokens. This takes up to two seconds for a large vocabulary."""
    definition = tokenizer.backend.to_str().encode()
    data = msgspec.json.decode(definition)
    control = _collect_control_tokens(tokenizer)
    plain_tokens = [token for token in data["added_tokens"] if token["content"] not in control]
    plain = tokenizers.Tokenizer.from_buffer(msgspec.json.encode({**data, "added_tokens": [], "post_processor": None}))
    if _would_keep_ids(plain, plain_tokens):  # better no such tokens than ones with other ids
        plain.add_tokens(
            [tokenizers.AddedToken(**{name: token[name] for name in _TOKEN_FIELDS}) for token in plain_tokens]
        )
    anchor = f"\ue002{secrets.token_hex(8)}\ue003"
    plain.add_tokens([tokenizers.AddedToken(anchor, normalized=False)])
    text = "a b"
    needs_no_anchor = encode_ids(plain, anchor + text)[1:] == encode_ids(plain, text)
    fingerprint = blake2b(definition, digest_size=16).digest()
    return _PlainTextEncoder(plain, None if needs_no_anchor else anchor, TextBound(data), fingerprint)


def _would_keep_ids(plain: tokenizers.Tokenizer, tokens: list[dict[str, Any]]) -> bool:
    """Whether these tokens would get their own ids if they were added: a tokenizer numbers new tokens from the end of
    its vocabulary."""
    next_id = plain.get_vocab_size()
    for token in tokens:
        assigned_id = plain.token_to_id(token["content"])
        if assigned_id is None:
            assigned_id, next_id = next_id, next_id + 1
        if assigned_id != token["id"]:
            return False
    return True

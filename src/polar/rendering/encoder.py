"""Rendered text to token ids, so that text from messages can never become control tokens.

A template writes control tokens as text, and so may anybody who writes a message. They are told apart before rendering:
where content spells a control token, `guard` breaks the spelling with a mark that no text has. After rendering,
whatever still spells a control token is the template's own; the spans in between are encoded as plain text. What is
joined to one text must be guarded as one text: two halves of a spelling are harmless only apart.

    content -> guard -> template -> rendered text -> split at control tokens -> ids

Invariant: for content without such spellings the ids are those of the tokenizer itself. A span is encoded once and
remembered, so a conversation costs only what is new in it. `limit_new_text` bounds how much new text a block of code
may guard and encode, for callers that must not be kept busy.
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
from polar.rendering.memo import Memo
from polar.rendering.tokenizer import TokenIds, Tokenizer, encode_ids

_GUARD_CACHE_BYTES = _SPAN_CACHE_BYTES = 64 * 1024 * 1024
"""For texts with their guarded form, and for spans of rendered text with their ids."""

_FIRST_SPAN_CACHE_BYTES = 8 * 1024 * 1024
"""For spans that begin a prompt, with their ids."""

_SCAN_PIECE_CHARACTERS = 32 * 1024
"""Characters of a piece that is encoded by itself, only to see how many tokens it has."""

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token in tokenizer.json, besides its id."""

_MAX_SET_LOOKUP_IDS = 1024
"""Ids up to which a Python set is the quickest way to find one among them."""

BREAK_PLACEHOLDER, TURN_PLACEHOLDER = "\x00", "\x01"
"""How digests of rendered text (continuation.py) write a break, and the place of a turn. Content that has these
characters is broken there too, so that it never looks like either."""

SPELLING_BREAK = f"`{secrets.token_hex(8)}`"
"""Stands within a spelling that is only text. Random, so that nobody can write it; made of characters that no JSON or
HTML escapes, and with edges that no control token has."""


NFC_SHRINKAGE = 3
"""Composing characters shortens UTF-8 to a third at most (a Hangul syllable from its three letters); ASCII stays."""

_LOSSLESS_PRE_TOKENIZERS = frozenset(("ByteLevel", "Metaspace", "Digits"))
_NORMALIZERS_TO_NFC = frozenset(("NFC", "NFD"))


class NewTextLimitExceeded(PolarError):
    """A prompt has more new text than the caller wanted to spend time on."""


class _Allowance:
    def __init__(self, left: int) -> None:
        self.remaining_bytes = left  # bytes


_allowance: ContextVar[_Allowance | None] = ContextVar("new_text_allowance", default=None)


@contextmanager
def limit_new_text(size: int) -> Iterator[None]:
    """Within, guarding and encoding raises NewTextLimitExceeded once more than `size` bytes of text had to be
    processed anew. Text that is both guarded and encoded counts twice."""
    token = _allowance.set(_Allowance(size))
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
        """Of the tokenizer: ids mean something only with the one that they are from."""
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
        """Content as it may go into a template."""
        return self._guard_memo(text)

    def encode(self, text: str, *, first: bool = True) -> TokenIds:
        """The ids of rendered text; `first` where it begins the prompt."""
        pieces: list[TokenIds] = []
        for control, span in self._split(text):
            if control is not None:
                pieces.append(np.array([self.control_tokens[control]], np.int32))
            elif span:
                pieces.append(self._first_span_memo(span) if first and not pieces else self._span_memo(span))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def exceeds_tokens(self, text: str, tokens: int) -> bool:
        """Whether a text has more tokens by far, found by encoding pieces of it until there are more than twice as
        many: a cut between two pieces adds a few tokens at most. False says nothing."""
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
        # A template may complete a spelling: '<function=' + name + '>'. It may trim the text before it does: breaks
        # stand within the white space at the edges, so that trimming comes to the same as without them.
        core = text.strip() if self._controls_are_trimmed else text
        before, _, behind = text.partition(core) if core else (text, "", "")
        near = range(1, self._longest)
        start = (
            SPELLING_BREAK if any(each[:cut] in self._control_suffixes for each in (text, core) for cut in near) else ""
        )
        end = (
            SPELLING_BREAK
            if any(each[-cut:] in self._control_prefixes for each in (text, core) for cut in near)
            else ""
        )
        if self._pattern.search(core) is not None or BREAK_PLACEHOLDER in core or TURN_PLACEHOLDER in core:
            core = self._breakable_pattern.sub(lambda found: found.group() + SPELLING_BREAK, core)
        if not start and core.strip() and any(core.strip() in token for token in self.control_tokens):
            start = SPELLING_BREAK  # ... on both sides: '<|' + name + '|>'
        guarded = before + start + core + end + behind
        return text if guarded == text else guarded  # nearly always: one object instead of two

    def _split(self, text: str) -> Iterator[tuple[str | None, str]]:
        """Control tokens and the plain spans between them, in order."""
        pieces = self._splitter.split(text)
        strip_left = False
        for index, piece in enumerate(pieces):
            if index % 2:
                yield piece, ""
                strip_left = self._flags.get(piece, (False, False))[1]
            else:
                if strip_left:  # such a token takes the white space behind it
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
            # A vocabulary that has the control token's text as an ordinary piece: cut the spelling in two.
            at = spelling.start() + 1
            behind = self._encode_checked(text[at:], anchored=self._anchor is not None)
            return np.concatenate([self._encode_checked(text[:at], anchored=anchored), behind])
        array.flags.writeable = False  # shared by all who ask
        return array

    def _has_control(self, ids: TokenIds) -> bool:
        if len(ids) > _MAX_SET_LOOKUP_IDS:
            return bool(np.isin(ids, self._control_ids).any())
        return not set(ids.tolist()).isdisjoint(self.control_tokens.values())


def _collect_control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens, and added ones that the template writes (`<think>`, `<tool_call>`). Others, such as runs of
    spaces and single characters, are ways to write text."""
    source = tokenizer.template_source
    return {
        token.content: id
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if len(token.content.strip()) > 1 and (token.special or token.content in source)
    }


def _build_pattern(words: Iterable[str]) -> str:
    """A pattern that matches the longest of the words at a position. It branches by character, so that its cost does
    not grow with the number of words: some models have hundreds of control tokens that begin alike."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _build_branches(tree) or r"(?!)"


def _build_branches(node: dict[str, Any]) -> str:
    options = [re.escape(character) + _build_branches(behind) for character, behind in node.items() if character]
    if not options:
        return ""
    pattern = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return f"{pattern}?" if "" in node else pattern


def _replace_surrogates(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer takes: it is shown as undecodable."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TextBound:
    """How long a text can be and still fit a context of so many tokens: what can't fit is refused before it is encoded.

    A token stands for at most as many bytes of text as the vocabulary's longest entry has. That holds where every byte
    of a text ends up in some token, so it depends on how the tokenizer normalises and cuts text. For one that may drop
    text, or that fuses unknown characters, there is no such bound. `data` is the contents of a tokenizer.json."""

    def __init__(self, data: dict[str, Any]) -> None:
        strips = any(token["lstrip"] or token["rstrip"] for token in data["added_tokens"])
        covers = _covers_all_bytes(data) and not strips
        self.bytes_per_token = _measure_longest_entry(data) if covers else None
        """None where a token may stand for any amount of text."""

    def can_fit(self, texts: list[str], tokens: int) -> bool:
        """Whether these texts may encode to so few tokens. False is certain; True is not."""
        if self.bytes_per_token is None:
            return True
        most = tokens * self.bytes_per_token
        size = 0
        for text in texts:
            size += len(text) if text.isascii() else _count_min_bytes(text)
            if size > most:
                return False
        return True


def _count_min_bytes(text: str) -> int:
    """Bytes of a text that are certainly left when it has been normalised."""
    total = len(text.encode("utf-8", "replace"))
    ascii_bytes = len(text.encode("ascii", "ignore"))
    return ascii_bytes + (total - ascii_bytes) // NFC_SHRINKAGE


def _measure_longest_entry(data: dict[str, Any]) -> int:
    """In bytes of text. A byte-level vocabulary writes each byte as one character; other ones write text."""
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


class _PlainTextEncoder(NamedTuple):
    """A tokenizer without its control tokens."""

    backend: tokenizers.Tokenizer
    anchor: str | None
    """Goes before a span where one is needed: some tokenizers treat the beginning of a text apart, which a span in the
    middle isn't."""
    text_bound: TextBound
    fingerprint: bytes


@lru_cache(8)
def _build_plain_text_encoder(tokenizer: Tokenizer) -> _PlainTextEncoder:
    """Takes up to two seconds, for a large vocabulary."""
    definition = tokenizer.backend.to_str().encode()
    data = msgspec.json.decode(definition)
    control = _collect_control_tokens(tokenizer)
    kept = [token for token in data["added_tokens"] if token["content"] not in control]
    plain = tokenizers.Tokenizer.from_buffer(msgspec.json.encode({**data, "added_tokens": [], "post_processor": None}))
    if _would_keep_ids(plain, kept):  # better no such tokens than ones with other ids
        plain.add_tokens([tokenizers.AddedToken(**{name: token[name] for name in _TOKEN_FIELDS}) for token in kept])
    anchor = f"\ue002{secrets.token_hex(8)}\ue003"
    plain.add_tokens([tokenizers.AddedToken(anchor, normalized=False)])
    text = "a b"
    same = encode_ids(plain, anchor + text)[1:] == encode_ids(plain, text)
    fingerprint = blake2b(definition, digest_size=16).digest()
    return _PlainTextEncoder(plain, None if same else anchor, TextBound(data), fingerprint)


def _would_keep_ids(plain: tokenizers.Tokenizer, tokens: list[dict[str, Any]]) -> bool:
    """Whether these tokens would get the ids that they have: a tokenizer numbers new ones from the end of its
    vocabulary."""
    following = plain.get_vocab_size()
    for token in tokens:
        given = plain.token_to_id(token["content"])
        if given is None:
            given, following = following, following + 1
        if given != token["id"]:
            return False
    return True

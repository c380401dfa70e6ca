"""Rendered text to token ids, so that text from messages can never become control tokens.

A template writes control tokens as text, and so may anybody who writes a message. They are told apart before rendering:
where content spells a control token, `guard` breaks the spelling with a mark that no text has. After rendering,
whatever still spells a control token is the template's own; the spans in between are encoded as plain text. What is
joined to one text must be guarded as one text: two halves of a spelling are harmless only apart.

    content -> guard -> template -> rendered text -> split at control tokens -> ids

Invariant: for content without such spellings the ids are those of the tokenizer itself. A span is encoded once and
remembered, so a conversation costs only what is new in it.
"""

import json
import re
import secrets
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import tokenizers

from polar.rendering.memo import Memo
from polar.rendering.tokenizer import Ids, Tokenizer

_REMEMBERED = 64 * 1024 * 1024
"""Characters of texts whose guarded form is kept, and of spans whose ids are."""

BROKEN, TURN = "\x00", "\x01"
"""How digests of rendered text (continuation.py) write a break, and the place of a turn. Content that has these
characters is broken there too, so that it never looks like either."""

BREAK = f"`{secrets.token_hex(8)}`"
"""Stands within a spelling that is only text. Random, so that nobody can write it; made of characters that no JSON or
HTML escapes, and with edges that no control token has."""


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.fingerprint = blake2b(tokenizer.backend.to_str().encode(), digest_size=16).digest()
        """Of the tokenizer: ids mean something only with the one that they are from."""
        self.control = _control_tokens(tokenizer)
        """Ids of the control tokens by their text."""
        longest_first = sorted(self.control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._splitter = re.compile(f"({self._pattern.pattern})")
        # One character at a time, since spellings can overlap.
        self._fragile = re.compile(f"(?={self._pattern.pattern}).|[{BROKEN}{TURN}]", re.DOTALL)
        self._beginnings = {token[:cut] for token in self.control for cut in range(1, len(token))}
        self._endings = {token[cut:] for token in self.control for cut in range(1, len(token))}
        self._trimmed = all(token == token.strip() for token in self.control)  # white space alone completes none
        self._longest = max(map(len, self.control), default=1)
        self._flags = {
            token.content: (token.lstrip, token.rstrip)
            for token in tokenizer.backend.get_added_tokens_decoder().values()
            if token.content in self.control and (token.lstrip or token.rstrip)
        }
        self._plain, self._anchor = _plain(tokenizer, set(self.control))
        self._guarded: Memo[str] = Memo(self._broken, _REMEMBERED)
        self._first_span: Memo[Ids] = Memo(self._encode_first, _REMEMBERED // 8)
        self._span: Memo[Ids] = Memo(self._encode_span, _REMEMBERED)

    def guard(self, text: str) -> str:
        """Content as it may go into a template."""
        return self._guarded(text)

    def encode(self, text: str, *, first: bool = True) -> Ids:
        """The ids of rendered text; `first` where it begins the prompt."""
        pieces: list[Ids] = []
        for control, span in self._split(text):
            if control is not None:
                pieces.append(np.array([self.control[control]], np.int32))
            elif span:
                pieces.append(self._first_span(span) if first and not pieces else self._span(span))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def is_control_at(self, text: str, start: int) -> bool:
        return self._pattern.match(text, start) is not None

    def controls(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        return self._pattern.finditer(text, start)

    def _broken(self, text: str) -> str:
        # A template may complete a spelling: '<function=' + name + '>'. It may trim the text before it does: breaks
        # stand within the white space at the edges, so that trimming comes to the same as without them.
        core = text.strip() if self._trimmed else text
        before, _, behind = text.partition(core) if core else (text, "", "")
        near = range(1, self._longest)
        start = BREAK if any(each[:cut] in self._endings for each in (text, core) for cut in near) else ""
        end = BREAK if any(each[-cut:] in self._beginnings for each in (text, core) for cut in near) else ""
        if self._pattern.search(core) is not None or BROKEN in core or TURN in core:
            core = self._fragile.sub(lambda found: found.group() + BREAK, core)
        if not start and core.strip() and any(core.strip() in token for token in self.control):
            start = BREAK  # ... on both sides: '<|' + name + '|>'
        return before + start + core + end + behind

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

    def _encode_first(self, span: str) -> Ids:
        return self._checked(span.replace(BREAK, ""), anchored=False)

    def _encode_span(self, span: str) -> Ids:
        return self._checked(span.replace(BREAK, ""), anchored=self._anchor is not None)

    def _checked(self, text: str, *, anchored: bool) -> Ids:
        text = _encodable(text)
        if anchored:
            ids = self._plain.encode(f"{self._anchor}{text}", add_special_tokens=False).ids[1:]
        else:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        if not set(ids).isdisjoint(self.control.values()) and (spelling := self._pattern.search(text)):
            # A vocabulary that has the control token's text as an ordinary piece: cut the spelling in two.
            at = spelling.start() + 1
            behind = self._checked(text[at:], anchored=self._anchor is not None)
            return np.concatenate([self._checked(text[:at], anchored=anchored), behind])
        array = np.asarray(ids, np.int32)
        array.flags.writeable = False  # shared by all who ask
        return array


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens, and added ones that the template writes (`<think>`, `<tool_call>`). Others, such as runs of
    spaces and single characters, are ways to write text."""
    source = tokenizer.template_source
    return {
        token.content: id
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if len(token.content.strip()) > 1 and (token.special or token.content in source)
    }


def _encodable(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer takes: it is shown as undecodable."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _plain(tokenizer: Tokenizer, control: set[str]) -> tuple[tokenizers.Tokenizer, str | None]:
    """The tokenizer without its control tokens, and an anchor where one is needed: some tokenizers treat the beginning
    of a text apart, which a span in the middle isn't."""
    data = json.loads(tokenizer.backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in control]
    data["post_processor"] = None
    plain = tokenizers.Tokenizer.from_str(json.dumps(data))
    kept = [token["content"] for token in data["added_tokens"]]
    if any(plain.token_to_id(content) != tokenizer.backend.token_to_id(content) for content in kept):
        data["added_tokens"] = []  # they would get other ids: better no such tokens than wrong ones
        plain = tokenizers.Tokenizer.from_str(json.dumps(data))
    anchor = f"\ue002{secrets.token_hex(8)}\ue003"
    plain.add_tokens([tokenizers.AddedToken(anchor, normalized=False)])
    text = "a b"
    same = plain.encode(anchor + text, add_special_tokens=False).ids[1:] == plain.encode(text).ids
    return plain, None if same else anchor

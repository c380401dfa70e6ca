"""The tokens of a call, coloured by kind: new context dim, what was sampled and trains in two shades of blue (so that
one sees where a token ends), what was sampled and does not train red and struck out."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.text import Text as Styled

from polar.records.exchange import Exchange, TokenIds
from polar.records.trajectory import TokenPath
from polar.rendering.tokenizer import Tokenizer, decode_pieces
from polar.store.arrays import NO_IDS, count_shared_prefix
from polar.types import Reasoning, Text, ToolCall

_EDGE_TOKENS = 60
"""Of a long context so many tokens are shown from each end."""
_SAMPLED_STYLES = ("cyan", "bright_cyan")
_EXCLUDED_STYLE = "red strike"
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def escape_controls(text: str) -> str:
    """With control characters as pictures: what a model wrote must not steer the terminal."""
    return text.translate(_CONTROL_PICTURES)


class TokenView:
    """Without a tokenizer there are ids, or only counts."""

    def __init__(self, tokenizer: Tokenizer | None, *, show_ids: bool, show_all: bool) -> None:
        self._tokenizer = tokenizer
        self._show_ids = show_ids
        self._counts_only = tokenizer is None and not show_ids
        self._show_all = show_all

    def render_lines(self, exchange: Exchange, path: TokenPath | None, parent: Exchange | None) -> Iterator[Styled]:
        if exchange.prompt_ids is not None:
            yield self._render_context(exchange.prompt_ids, parent)
        sampled = exchange.sampled_ids
        if sampled is not None:
            line = Styled(f"sampled ({len(sampled)}): ", "bold")
            styles = [_SAMPLED_STYLES[at % 2] for at in range(len(sampled))]
            for excluded in () if path is None else path.excluded:
                styles[excluded.start : excluded.stop] = [_EXCLUDED_STYLE] * (excluded.stop - excluded.start)
            if self._counts_only:
                yield line.append(f"{len(sampled) - styles.count(_EXCLUDED_STYLE)} train", "not bold")
            else:
                yield line.append_text(self._render_tokens(sampled, styles))

    def _render_context(self, prompt: TokenIds, parent: Exchange | None) -> Styled:
        """What is new since the call that this one goes on from."""
        before = NO_IDS
        if parent is not None and parent.prompt_ids is not None:
            sampled = NO_IDS if parent.sampled_ids is None else parent.sampled_ids
            before = np.concatenate((parent.prompt_ids, sampled))
        shared = count_shared_prefix(prompt, before)
        new = prompt[shared:]
        line = Styled(f"context ({len(prompt)}): ", "bold")
        if parent is not None:
            otherwise = ", which goes on otherwise" if shared < len(before) else ""
            line.append(f"[{shared} as in #{parent.seq}{otherwise}] ", "dim")
        if self._counts_only:
            return line.append(f"{len(new)} new", "not bold")
        if len(new) > 2 * _EDGE_TOKENS and not self._show_all:
            first, last = new[:_EDGE_TOKENS], new[-_EDGE_TOKENS:]
            line.append_text(self._render_tokens(first, ["dim"] * _EDGE_TOKENS))
            line.append(f" … {len(new) - 2 * _EDGE_TOKENS} tokens … ", "dim italic")
            return line.append_text(self._render_tokens(last, ["dim"] * _EDGE_TOKENS))
        return line.append_text(self._render_tokens(new, ["dim"] * len(new)))

    def _render_tokens(self, ids: TokenIds, styles: Iterable[str]) -> Styled:
        line = Styled()
        numbers = ids.tolist()
        texts = [""] * len(numbers) if self._tokenizer is None else decode_pieces(self._tokenizer, numbers)
        for id, text, style in zip(numbers, texts, styles, strict=True):
            line.append(escape_controls(text).replace("\n", "↵\n"), style)
            if self._show_ids:
                line.append(f"⟨{id}⟩", "dim yellow")
        return line


def decodes_to_replies(tokenizer: Tokenizer, exchanges: Sequence[Exchange]) -> bool:
    """Whether it is this tokenizer that the sampled ids are from: they decode to what the first replies say."""
    num_compared = 0
    for exchange in exchanges:
        if exchange.reply is None or exchange.sampled_ids is None or num_compared == 3:
            continue
        said = [
            part.name if isinstance(part, ToolCall) else part.text.strip()
            for part in exchange.reply.parts
            if isinstance(part, Text | Reasoning | ToolCall)
        ]
        decoded = tokenizer.decode(exchange.sampled_ids.tolist())
        if not all(text in decoded for text in said):
            return False
        num_compared += bool(said)
    return num_compared > 0

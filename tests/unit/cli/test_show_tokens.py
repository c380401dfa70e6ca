"""Tokens by kind: which are new context, which were sampled, which of those don't train."""

from typing import Any

import numpy as np
import pytest
from rich.text import Text as Styled

from polar.cli.show_tokens import TokenView, decodes_to_replies
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.records.exchange import Exchange
from polar.records.spans import ExcludedSpan
from polar.rendering.tokenizer import Tokenizer
from polar.types import Reply, Text
from tests.unit.cli.test_show import call, path_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER_FOLDER)


def turn(tokenizer: Tokenizer, seq: int, prompt: str, sampled: str, **changes: Any) -> Exchange:
    ids = {"prompt_ids": tokenizer.encode(prompt), "sampled_ids": tokenizer.encode(sampled)}
    arrays = {name: np.array(values, np.int32) for name, values in ids.items()}
    return call(seq, None, **arrays, reply=Reply(f"x{seq}", "m", 0, [Text(f"{sampled}\n")]), **changes)


def lines(view: TokenView, exchange: Exchange, parent: Exchange | None = None, **changes: Any) -> list[Styled]:
    return list(view.render_lines(exchange, path_of(exchange, **changes), parent))


def styled(line: Styled) -> list[tuple[str, str]]:
    """Each piece with its style, without the heading."""
    return [(line.plain[span.start : span.end], str(span.style)) for span in line.spans]


def test_kinds_have_styles(tokenizer: Tokenizer) -> None:
    exchange = turn(tokenizer, 0, "What is it?", " It is a note")
    count = len(tokenizer.encode(" It is a note"))
    view = TokenView(tokenizer, show_ids=False, show_all=False)
    context, sampled = lines(view, exchange, excluded=[ExcludedSpan("x0", count - 1, count, "undelivered")])
    assert context.plain.endswith(": What is it?")
    assert {style for _, style in styled(context)} == {"dim"}
    assert sampled.plain == f"sampled ({count}):  It is a note"
    *trained, (_, last) = styled(sampled)
    assert last == "red strike"
    assert [style for _, style in trained] == [("cyan", "bright_cyan")[at % 2] for at in range(count - 1)]


def test_only_what_is_new_in_a_context_is_shown(tokenizer: Tokenizer) -> None:
    first = turn(tokenizer, 3, "one two", " three")
    view = TokenView(tokenizer, show_ids=False, show_all=False)
    goes_on, _ = lines(view, turn(tokenizer, 4, "one two three four", "x"), first)
    assert goes_on.plain.endswith("as in #3]  four")
    breaks, _ = lines(view, turn(tokenizer, 5, "one six", "x"), first)
    assert "as in #3, which goes on otherwise]" in breaks.plain
    assert breaks.plain.endswith(" six")


def test_a_long_context_is_cut_unless_all_is_asked_for(tokenizer: Tokenizer) -> None:
    exchange = turn(tokenizer, 0, " ".join(f"w{number}" for number in range(500)), "x")
    cut, _ = lines(TokenView(tokenizer, show_ids=False, show_all=False), exchange)
    assert " tokens … " in cut.plain
    assert "w250" not in cut.plain
    whole, _ = lines(TokenView(tokenizer, show_ids=False, show_all=True), exchange)
    assert "w250" in whole.plain


def test_ids_and_counts(tokenizer: Tokenizer) -> None:
    exchange = turn(tokenizer, 0, "a\x1b", "b\n")
    first, second = tokenizer.encode("b\n")
    context, sampled = lines(TokenView(tokenizer, show_ids=True, show_all=False), exchange)
    assert "␛" in context.plain
    assert sampled.plain == f"sampled (2): b⟨{first}⟩↵\n⟨{second}⟩"
    _, sampled = lines(TokenView(None, show_ids=True, show_all=False), exchange)
    assert sampled.plain == f"sampled (2): ⟨{first}⟩⟨{second}⟩"
    counts = TokenView(None, show_ids=False, show_all=False)
    context, sampled = lines(counts, exchange, excluded=[ExcludedSpan("x0", 1, 2, "undelivered")])
    assert context.plain == "context (2): 2 new"
    assert sampled.plain == "sampled (2): 1 train"


def test_a_tokenizer_is_believed_only_if_it_says_what_the_replies_say(tokenizer: Tokenizer) -> None:
    right = turn(tokenizer, 0, "hi", "A short note")
    assert decodes_to_replies(tokenizer, [right])
    assert right.sampled_ids is not None
    right.sampled_ids = right.sampled_ids + 1  # another model's ids
    assert not decodes_to_replies(tokenizer, [right])
    assert not decodes_to_replies(tokenizer, [])

"""A memo holds no more bytes than it may, whatever it is asked for."""

import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from polar.rendering import messages, turn_digest
from polar.rendering.memo import ENTRY_BYTES, Memo
from polar.types import ToolCall

BUDGET = 1_000_000


def traced_growth(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{}", id="short"),
        pytest.param("{} " + "word " * 100, id="long"),
        pytest.param("{} 東京🙂", id="wide"),
        pytest.param("{} " + "🙂" * 500, id="long and wide"),
    ],
)
def test_a_memo_stays_within_its_budget(text: str) -> None:
    memo: Memo[str, np.ndarray] = Memo(lambda text: np.zeros(len(text) // 3, np.int32), BUDGET)

    def fill() -> None:
        for number in range(20_000):
            memo(text.format(number))

    assert 0.5 * BUDGET < traced_growth(fill) < 1.2 * BUDGET
    assert memo.size_bytes <= BUDGET


def test_a_memo_computes_once_and_forgets_what_was_asked_for_longest_ago() -> None:
    computed: list[str] = []

    def compute(text: str) -> str:
        computed.append(text)
        return text

    memo = Memo(compute, 3 * (sys.getsizeof("a") + ENTRY_BYTES))
    for text in "abcadb":
        assert memo(text) == text
    assert computed == ["a", "b", "c", "d", "b"]
    assert len(memo) == 3


def test_what_does_not_fit_is_computed_and_not_kept() -> None:
    memo = Memo(str.upper, 1000)
    memo("a")
    assert memo("b" * 1000) == "B" * 1000
    assert (len(memo), memo.size_bytes) == (0, 0)


def test_what_may_not_be_computed_is_not_kept() -> None:
    def charge(text: str) -> None:
        raise OverflowError(text)

    memo = Memo(str.upper, BUDGET, charge=charge)
    with pytest.raises(OverflowError):
        memo("a")
    assert len(memo) == 0


def test_calls_with_long_arguments_are_remembered_up_to_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_digest, "_call_memo", Memo(turn_digest._call_memo._compute, BUDGET))

    def fill() -> None:
        for number in range(100):
            arguments = json.dumps({"path": str(number), "content": "x" * 50_000})
            turn_digest.digest_turn([ToolCall("id", "write", arguments)])

    assert traced_growth(fill) < 1.2 * BUDGET


def test_tools_are_remembered_up_to_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        messages, "_spec_memo", Memo(messages._make_spec, BUDGET, measure=messages._estimate_spec_bytes)
    )
    guard = str

    def fill() -> None:
        for number in range(300):
            properties = {f"{number} {n}": {"type": "string", "description": "Say it."} for n in range(50)}
            parameters = json.dumps({"type": "object", "properties": properties}).encode()
            spec = messages._spec_memo((f"tool {number}", "Does it.", parameters, guard))
            assert spec.json

    assert traced_growth(fill) < 1.2 * BUDGET


def test_threads_share_a_memo() -> None:
    """Entries are forgotten by one thread while others ask for them."""
    memo = Memo(str.strip, 10 * (sys.getsizeof("abc") + ENTRY_BYTES))
    texts = [f"{number:03d}" for number in range(30)]

    def ask(seed: int) -> None:
        for text in random.Random(seed).choices(texts, k=20_000):
            assert memo(text) == text

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert len(memo) == 10
    assert memo.size_bytes == 10 * (sys.getsizeof("abc") + ENTRY_BYTES)

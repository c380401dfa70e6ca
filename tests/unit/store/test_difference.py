import tracemalloc
from hashlib import sha256

import msgspec
import numpy as np
from msgspec import Raw

from polar.store.lineage import BaseMatch, Digester, Lineage
from polar.store.sized_cache import SizedCache


def digests(word: str) -> list[bytes]:
    return [letter.encode() * 16 for letter in word]


def lineage(*words: str) -> Lineage:
    """Exchanges 0, 1, ... whose items are the letters of the words."""
    made = Lineage()
    for seq, word in enumerate(words):
        base, _, shared = made.find_base(seq, digests(word))
        made.add(seq, f"x{seq}", base, shared, digests(word[shared:]), b"")
    return made


def match(word: str, *words: str) -> BaseMatch:
    return lineage(*words).find_base(len(words), digests(word))


def test_the_first_has_neither_base_nor_parent() -> None:
    assert match("ab") == (None, None, 0)


def test_a_turn_extends_the_one_before() -> None:
    assert match("abcde", "a", "abc") == (1, "x1", 3)


def test_a_retry_has_the_same_parent_and_is_stored_against_the_first_try() -> None:
    assert match("abc", "a", "abc") == (1, "x0", 3)


def test_among_equals_the_latest_is_the_parent() -> None:
    assert match("abcde", "a", "abc", "abc") == (2, "x2", 3)


def test_the_longest_is_the_parent_even_if_a_shorter_one_came_later() -> None:
    assert match("abcde", "a", "abc", "a") == (1, "x1", 3)


def test_a_rewritten_item_ends_what_is_shared() -> None:
    assert match("abXde", "a", "abcd") == (1, "x0", 2)


def test_one_that_shares_nothing_is_stored_against_the_latest() -> None:
    assert match("xyz", "a", "abc") == (1, None, 0)


def test_an_empty_request_is_nobodys_parent() -> None:
    assert match("ab", "") == (0, None, 0)


def test_one_that_arrived_later_is_not_the_parent() -> None:
    made = lineage("a")
    made.add(7, "x7", 0, 1, digests("b"), b"")
    assert made.find_base(3, digests("abc")).parent == "x0"
    assert made.find_base(8, digests("abc")).parent == "x7"


def test_equal_items_in_a_row() -> None:
    assert match("aaaa", "aa", "aaa") == (1, "x1", 3)


def test_digests_are_those_of_the_bytes_whatever_is_remembered() -> None:
    def plain(pieces: list[bytes]) -> list[bytes]:
        return [sha256(piece).digest()[:16] for piece in pieces]

    digester = Digester()
    requests = [[b"1", b"2"], [b"1", b"2", b"3"], [b"1", b"X", b"3"], [], [b"1"], [b"1", b"X"]]
    for request in requests:
        for conversation in ("s1", "s2"):
            assert digester.digest_items(conversation, [Raw(piece) for piece in request]) == plain(request)
    for field in (b"a" * 5000, b"a" * 4999 + b"b", b"a" * 5000, b"a" * 100):
        assert [digester.digest_field(field)] == plain([field])


def test_items_are_counted_with_what_surrounds_them() -> None:
    digester = Digester()
    items = msgspec.json.decode(msgspec.json.encode([*range(10_000)]), type=list[Raw])  # as a request has them
    tracemalloc.start()
    digester.digest_items("s", items)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * held < digester.size < 1.5 * held
    digester.forget("s")
    assert digester.size == 0


def test_contexts_are_held_for_the_tips_only() -> None:
    made = Lineage()
    context = np.zeros(100, np.int32)
    made.add(0, "x0", None, 0, [], b"")
    made.move_context(None, 0, context)
    empty = Lineage().size
    made.move_context(0, 1, context)
    assert made.get_context(0) is None
    assert made.get_context(1) is not None
    for seq in range(2, 2 + Lineage.MAX_CONTEXTS):
        made.move_context(None, seq, context)
    assert made.get_context(1) is None
    assert made.size < empty + 1000 + Lineage.MAX_CONTEXTS * context.nbytes


def test_lru_forgets_the_oldest_within_its_budget() -> None:
    lru: SizedCache[str, str] = SizedCache(10)
    lru.put("a", "A", 4)
    lru.put("b", "B", 4)
    lru.put("a", "A2", 5)
    lru.put("c", "C", 4)
    assert (lru.get("a"), lru.get("b"), lru.get("c"), lru.size, len(lru)) == ("A2", None, "C", 9, 2)
    lru.put("d", "D", 11)
    assert (lru.size, len(lru)) == (0, 0)

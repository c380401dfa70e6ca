"""A memory of what was used last."""

from polar.store.sized_cache import SizedCache


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    known: SizedCache[str, int] = SizedCache(30)
    for number, key in enumerate("abc"):
        known.put(key, number, 10)
    assert known.get("a") == 0
    known.put("d", 3, 10)
    assert [known.get(key) for key in "abcd"] == [0, None, 2, 3]
    known.put("e", 4, 25)
    assert [known.get(key) for key in "acde"] == [None, None, None, 4]
    assert (len(known), known.size) == (1, 25)
    known.put("f", 5, 31)  # more than there is room for
    assert (known.get("f"), known.size) == (None, 0)

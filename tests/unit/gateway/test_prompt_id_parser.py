"""Prompt ids are read right whatever was read before."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.prompt_id_parser import PromptIdParser

prompts = st.lists(st.integers(0, 300_000), min_size=0, max_size=30)


@given(st.lists(st.tuples(st.sampled_from("abc"), prompts, st.booleans()), max_size=12), st.integers(0, 2_000))
def test_every_prompt_is_read_as_json_reads_it(read: list[tuple[str, list[int], bool]], memory: int) -> None:
    parser = PromptIdParser(memory)
    before: dict[str, list[int]] = {}
    for session, tail, goes_on in read:
        ids = [*before.get(session, []), *tail] if goes_on else tail
        before[session] = ids
        for separators in ((",", ":"), (", ", ": ")):
            assert parser.parse(session, json.dumps(ids, separators=separators).encode()).tolist() == ids


def test_a_number_that_goes_on_is_not_cut() -> None:
    parser = PromptIdParser()
    for text in (b"[1,2]", b"[1,23]", b"[1,2,3]", b"[12]", b"[1]", b"[]", b"[7]"):
        assert parser.parse("s", text).tolist() == json.loads(text)
        assert parser.parse("s", text).dtype == np.int32


@pytest.mark.parametrize("text", [b"[1,2", b"[1.5]", b"{}", b'["a"]', b"[1,,2]", b"[99999999999]"])
@pytest.mark.parametrize("before", [b"[1,2,3]", b"[]"])
def test_what_is_no_list_of_ids_is_refused(before: bytes, text: bytes) -> None:
    parser = PromptIdParser()
    parser.parse("s", before)
    with pytest.raises((ValueError, OverflowError)):
        parser.parse("s", text)
    assert parser.parse("s", b"[1,2,3,4]").tolist() == [1, 2, 3, 4]

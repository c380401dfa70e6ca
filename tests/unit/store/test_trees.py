"""Whatever tree of conversations a session is, it reads back exactly, and parents are what their definition says."""

import asyncio
import tempfile
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from polar.records.exchange import Exchange, TokenIds
from polar.store.lineage import Lineage
from polar.store.relational import LINEAGE_MEMORY_BYTES
from tests.unit.store.places import Place
from tests.unit.store.samples import exchange, fingerprint, session, wire
from tests.unit.store.servers import Server

ITEMS = [b"1", b'"two"', b'{"three": 3}', b'"' + b"4" * 5000 + b'"']
FIELDS = [{}, {"stream": b"false"}, {"tools": b'"' + b"x" * 300 + b'"'}, {"tools": b'"' + b"y" * 300 + b'"', "n": b"1"}]


class Step(Struct):
    """One call: it goes on from an earlier one, keeps so much of its items and tokens, and adds these."""

    of: int
    keep_items: int
    add_items: list[int]
    keep_tokens: int | None  # None: the prompt's ids are not known
    add_tokens: list[int]
    sampled: list[int] | None
    fields: int
    agent: str | None
    reopen: bool


steps = st.builds(
    Step,
    of=st.integers(0, 5),
    keep_items=st.integers(0, 12) | st.just(99),
    add_items=st.lists(st.integers(0, len(ITEMS) - 1), max_size=3),
    keep_tokens=st.none() | st.integers(0, 30) | st.just(99),
    add_tokens=st.lists(st.integers(0, 2), max_size=6),
    sampled=st.none() | st.lists(st.integers(0, 2), max_size=4),
    fields=st.integers(0, len(FIELDS) - 1),
    agent=st.sampled_from([None, "a"]),
    reopen=st.sampled_from([False, False, False, True]),
)


def array(values: Sequence[int]) -> TokenIds:
    return np.array(values, np.int32)


def made(plan: list[Step], seqs: list[int]) -> list[Exchange]:
    """The exchanges of a plan in the order in which they are written."""
    items: list[list[bytes]] = [[]]
    tokens: list[list[int]] = [[]]
    exchanges = []
    for step, seq in zip(plan, seqs, strict=True):
        of = max(0, len(items) - 1 - step.of)
        own = items[of][: step.keep_items] + [ITEMS[n] for n in step.add_items]
        prompt = None if step.keep_tokens is None else tokens[of][: step.keep_tokens] + step.add_tokens
        exchanges.append(
            exchange(
                "s",
                seq,
                [],
                raw_request=wire(own, **FIELDS[step.fields]),
                prompt_ids=None if prompt is None else array(prompt),
                sampled_ids=None if step.sampled is None else array(step.sampled),
            )
        )
        items.append(own)
        tokens.append((tokens[of] if prompt is None else prompt) + (step.sampled or []))
    return exchanges


def find_candidates(of: Exchange, earlier: list[Exchange]) -> list[Exchange]:
    """The earlier exchanges whose whole request this one's begins with."""

    def items(it: Exchange) -> list[bytes]:
        return [bytes(item) for item in it.raw_request.items]

    own = items(of)
    return [it for it in earlier if it.seq < of.seq and (n := len(items(it))) and n < len(own) and own[:n] == items(it)]


def find_parent(of: Exchange, earlier: list[Exchange]) -> str | None:
    found = max(find_candidates(of, earlier), key=lambda it: (len(it.raw_request.items), it.seq), default=None)
    return None if found is None else found.exchange_id


plans = st.lists(steps, min_size=1, max_size=14)
memories = st.sampled_from([LINEAGE_MEMORY_BYTES, 0])


def check_tree(plan: list[Step], shuffle: Random, memory: int, place: Place, *, one_lineage: bool = True) -> None:
    seqs = list(range(len(plan)))
    for start in range(0, len(seqs), 4):  # calls that run at the same time end in any order
        window = seqs[start : start + 4]
        shuffle.shuffle(window)
        seqs[start : start + 4] = window
    exchanges = made(plan, seqs)

    async def run() -> None:
        store = place.open(memory=memory)
        await store.create_session(session("s"))
        for number, (step, it) in enumerate(zip(plan, exchanges, strict=True)):
            if step.reopen:
                await store.close()
                store = place.open(memory=memory)
            earlier = exchanges[:number]
            await store.append(it)
            if one_lineage:
                assert it.parent == find_parent(it, earlier)
            else:  # what began before the latest lineage may have been forgotten
                assert it.parent is None or it.parent in [known.exchange_id for known in find_candidates(it, earlier)]
        found = [it async for it in store.read_exchanges("s")]
        await store.close()
        assert [fingerprint(it) for it in found] == [fingerprint(it) for it in sorted(exchanges, key=lambda it: it.seq)]

    asyncio.run(run())


@given(plan=plans, shuffle=st.randoms(), memory=memories)
def test_any_tree_reads_back(plan: list[Step], shuffle: Random, memory: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_tree(plan, shuffle, memory, Place(f"sqlite:{folder}/polar.db"))


@given(plan=plans, shuffle=st.randoms(), memory=memories, size=st.integers(0, 5_000))
def test_any_tree_reads_back_where_lineages_are_full_early(
    plan: list[Step], shuffle: Random, memory: int, size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lineage, "MAX_TRIE_BYTES", size)
        check_tree(plan, shuffle, memory, Place(f"sqlite:{folder}/polar.db"), one_lineage=False)


@settings(max_examples=10, deadline=None)
@given(plan=plans, shuffle=st.randoms(), memory=memories)
def test_any_tree_reads_back_from_postgresql(server: Server, plan: list[Step], shuffle: Random, memory: int) -> None:
    check_tree(plan, shuffle, memory, Place(server.new_database()))

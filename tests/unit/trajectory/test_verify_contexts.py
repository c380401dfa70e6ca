"""What is continued from an earlier prompt is what a whole look at the prompt would give."""

from hashlib import sha256

import numpy as np
from hypothesis import given

from polar.store import checksum as checksums
from polar.store.arrays import ids_to_bytes
from polar.trajectory.verify import check_records
from polar.trajectory.verify_contexts import ContextIndex
from tests.unit.trajectory.test_verify import Sound, row, sessions


@given(sessions())
def test_digests_that_are_continued_are_those_of_whole_prompts(it: Sound) -> None:
    for hint in (None, it.exchanges[0].exchange_id):
        contexts = ContextIndex()
        for exchange in it.exchanges:
            exchange.parent = hint if exchange.exchange_id != hint else None
            assert exchange.prompt_ids is not None
            assert contexts.add(exchange).digest_prompt() == sha256(ids_to_bytes(exchange.prompt_ids)).digest()


@given(sessions())
def test_tokens_that_are_said_to_be_repeated_are(it: Sound) -> None:
    contexts = ContextIndex(it.exchanges)
    for later in it.exchanges:
        for earlier in it.exchanges:
            known = contexts[later.exchange_id].count_shared_prefix(contexts[earlier.exchange_id])
            one, other = (np.concatenate((e.prompt_ids, e.sampled_ids))[:known] for e in (later, earlier))  # type: ignore[arg-type]
            assert len(one) == known
            assert one.tolist() == other.tolist()


def test_rows_of_an_older_version_are_checked_as_they_were_written() -> None:
    exchange = row("s", 0, [1, 2], [3, 4])
    assert exchange.prompt_ids is not None
    exchange.checksum = checksums._digest(exchange, ids_to_bytes(exchange.prompt_ids))
    assert len(exchange.checksum) == 16
    assert check_records([exchange]) == []
    exchange.prompt_ids = exchange.prompt_ids + 1
    assert [problem.kind for problem in check_records([exchange])] == ["checksum"]

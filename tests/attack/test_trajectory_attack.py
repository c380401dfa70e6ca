"""Attacks on what is handed out: engines' odd labels, rows that were tampered with, sampling that changes midway."""

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.cli.verify import VerifyFindings, verify_sessions
from polar.engines.scripted import TOKENIZER_FOLDER
from polar.records.trajectory import SessionPaths
from polar.records.trajectory import TokenPath as TokenPath
from polar.store import open_store
from polar.trajectory import session as sessions
from polar.trajectory.builders import prefix_merging
from tests.attack.parts import bench
from tests.attack.replies import DONE, event, stream
from tests.integration.stack import settings


def sample(ids: list[int], **fields: Any) -> bytes:
    logprobs = {"content": [{"token_id": id, "logprob": -0.5} for id in ids]}
    return event(choices=[{"index": 0, "token_ids": ids, "logprobs": logprobs, **fields}])


async def captured(data: Path, versions: list[tuple[int, int, int]], calls: int = 1) -> str:
    """A session whose engine labels its three tokens like this."""
    labels = [{"version": version, "start": start, "end": end} for version, start, end in versions]
    async with bench(data, engine={"kind": "vllm", "tokenizer": str(TOKENIZER_FOLDER)}) as it:
        it.engine.replay(stream(sample([11, 12]), sample([2], finish_reason="stop", weight_versions=labels), DONE))
        for number in range(calls):
            assert (await it.ask(stream=True, text=str(number))).status == 200
        await it.recorded(calls)
        return it.session_id


async def checked(data: Path) -> VerifyFindings:
    return await verify_sessions(settings([]), data, [])


@pytest.mark.parametrize(
    "versions",
    [
        [(1_731_650_000_000, 0, 3)],  # a time stamp
        [(-3, 0, 1), (0, 1, 3)],
        [(1, 0, 2), (2, 1, 3)],
        [(1, 0, 1), (2, 2, 3)],
        [(1, 0, 2)],
    ],
    ids=["huge", "negative", "overlap", "gap", "short"],
)
async def test_odd_version_labels(tmp_path: Path, versions: list[tuple[int, int, int]]) -> None:
    """Whatever an engine calls its weights, the session is built and verifies; what can't be used is excluded."""
    session_id = await captured(tmp_path, versions)
    assert (await checked(tmp_path)).describe_failure(0) is None
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}", "process")
    try:
        prefix_merging(await sessions.load_session_paths(store, session_id))
    finally:
        await store.close()


async def test_an_engine_that_knows_its_weights_and_says_nothing_of_them(tmp_path: Path) -> None:
    """It may have come back with other ones than it was given: nobody else's word counts."""
    async with bench(tmp_path, engine={"kind": "embedded", "tokenizer": str(TOKENIZER_FOLDER)}) as it:
        it.engine.replay(stream(sample([11, 12]), sample([2], finish_reason="stop"), DONE))
        assert (await it.ask(stream=True)).status == 200
        (exchange,) = await it.recorded(1)
    assert (exchange.versions, exchange.untrainable) == ([], "version_unknown")


def path(seq: int, prompt: list[int], sampled: list[int], temperature: float) -> TokenPath:
    ids = [np.array(it, np.int32) for it in (prompt, sampled)]
    zeros = np.zeros(len(sampled))
    return TokenPath(  # type: ignore[call-arg]
        "s",
        f"x{seq}",
        seq,
        *ids,
        zeros.astype(np.float32),
        zeros.astype(np.int32),
        len(sampled),
        temperature=temperature,
    )


def test_a_trace_has_one_temperature() -> None:
    """A trainer divides all of a trace's logits by the one that the trace names."""
    first, second = path(0, [1], [2, 3], 1.0), path(1, [1, 2, 3, 4], [5], 0.2)
    said = {first.exchange_id: 1.0, second.exchange_id: 0.2}
    for trace in prefix_merging(SessionPaths("s", [first, second])).traces:
        assert trace.temperature is None or {said[id] for id in trace.exchange_ids} == {trace.temperature}


TAMPERED = {
    "another temperature": "UPDATE exchanges SET detail = json_set(detail, '$.sampling.temperature', 0) WHERE seq = 1",
    "a removed checksum": "UPDATE exchanges SET checksum = NULL, logprobs = zeroblob(length(logprobs)) WHERE seq = 2",
    "a parent that is itself": "UPDATE exchanges SET parent = exchange_id WHERE seq = 1",
    "a base that is itself": "UPDATE exchanges SET base = seq, shared_tokens = 1 WHERE seq = 1",
    "less than nothing shared": "UPDATE exchanges SET base = 0, shared_tokens = -5 WHERE seq = 1",
}


@pytest.mark.parametrize("sql", TAMPERED.values(), ids=TAMPERED)
async def test_tampered_rows_are_seen(tmp_path: Path, sql: str) -> None:
    """And at once: what follows a row to the one that it is stored against must come to an end."""
    await captured(tmp_path, [(0, 0, 3)], calls=3)
    with sqlite3.connect(tmp_path / "polar.db") as db:
        assert db.execute(sql).rowcount == 1
    command = (str(Path(sys.executable).with_name("polar")), "verify", "--data", str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert await asyncio.wait_for(process.wait(), 120) == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

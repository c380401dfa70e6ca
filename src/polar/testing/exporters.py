"""What every exporter must keep:

    class TestMine(ExporterContract):
        plugin = Mine

        def read(self, data):                 # for formats of traces
            for line in data.splitlines():
                row = json.loads(line)
                yield ExportedTrace.make(row["ids"], row["mask"], row["logprobs"], row["reward"])

Sessions come from a real store through the pipeline of `polar export`, so an exporter gets what its `needs` ask for.
With `read`, what it wrote is compared with the recorded traces, to the bit.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from polar.export.base import Exporter, ExportNeed, SessionItem
from polar.export.pipeline import ExportTally, Selection, select_items
from polar.records import wire
from polar.records.session import Session
from polar.records.trajectory import Trace
from polar.store.relational import RelationalStore
from polar.store.sqlite import open_sqlite_store
from polar.testing.contract import Contract
from polar.testing.conversations import Talk, said
from polar.trajectory.builders import prefix_merging
from polar.types import Part, Text, ToolCall

_START = 1_700_000_000.0


class ExportedTrace(NamedTuple):
    """A trace as a trainer reads it. Where a token does not train, its log-probability is zero here: no trainer looks
    at it."""

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    logprobs: bytes | None  # float32, bit for bit
    reward: float | None

    @classmethod
    def make(
        cls, tokens: Sequence[int], mask: Sequence[Any], logprobs: Sequence[float] | None, reward: float | None
    ) -> "ExportedTrace":
        """Mask and log-probabilities are as long as the tokens."""
        trains = [bool(value) for value in mask]
        assert len(tokens) == len(trains)
        recorded: NDArray[np.float32] | None = None
        if logprobs is not None:
            assert len(logprobs) == len(tokens)
            recorded = np.where(trains, np.array(logprobs, np.float32), np.float32(0))
        return cls(tuple(tokens), tuple(trains), None if recorded is None else recorded.tobytes(), reward)

    @classmethod
    def from_trace(cls, trace: Trace) -> "ExportedTrace":
        prompt = len(trace.prompt_ids)
        return cls.make(
            [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
            [0] * prompt + trace.loss_mask.tolist(),
            None if trace.logprobs is None else [0.0] * prompt + trace.logprobs.tolist(),
            trace.reward,
        )


class ExporterContract(Contract):
    kind = "exporters"

    def make_exporter(self) -> Exporter:
        made: Exporter = self.plugin()
        return made

    def read(self, data: bytes) -> Iterable[ExportedTrace]:
        """What stands in an export, in its order. Formats that hold no traces leave this as it is."""
        raise NotImplementedError

    def test_what_it_says_of_itself(self) -> None:
        exporter = self.make_exporter()
        assert exporter.name
        assert exporter.needs <= set(get_args(ExportNeed))
        assert isinstance(exporter.is_binary, bool)
        assert (exporter.rows, exporter.left_out) == (0, Counter())

    async def test_it_writes_bytes_and_counts_rows(self, tmp_path: Path) -> None:
        exporter = self.make_exporter()
        items = await select_samples(exporter, tmp_path)
        assert items, "none of the sample sessions has what this exporter needs"
        data = write_items(exporter, items)
        assert isinstance(data, bytes)
        assert data
        assert exporter.rows > 0
        if not exporter.is_binary:
            assert data.endswith(b"\n")
            lines = [json.loads(line, parse_constant=_refuse_constant) for line in data.splitlines()]
            assert len(lines) == exporter.rows

    async def test_the_same_sessions_give_the_same_bytes(self, tmp_path: Path) -> None:
        items = await select_samples(self.make_exporter(), tmp_path)
        assert write_items(self.make_exporter(), items) == write_items(self.make_exporter(), items)

    async def test_sessions_are_left_as_they_are(self, tmp_path: Path) -> None:
        items = await select_samples(self.make_exporter(), tmp_path)
        before = [_describe(item) for item in items]
        write_items(self.make_exporter(), items)
        assert [_describe(item) for item in items] == before

    def test_without_sessions_there_are_no_rows(self) -> None:
        exporter = self.make_exporter()
        assert isinstance(exporter.finish(), bytes)
        assert exporter.rows == 0

    async def test_what_it_wrote_are_the_recorded_traces(self, tmp_path: Path) -> None:
        exporter = self.make_exporter()
        items = await select_samples(exporter, tmp_path)
        data = write_items(exporter, items)
        try:
            found = Counter(self.read(data))
        except NotImplementedError:
            pytest.skip(f"{self.plugin.__name__} is not read back (read)")
        assert found == Counter(ExportedTrace.from_trace(trace) for item in items for trace in item.trajectory.traces)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _describe(item: SessionItem) -> Any:
    exchanges = [(one.exchange_id, one.reply, one.raw_request.fields.keys()) for one in item.exchanges]
    return wire.trajectory_to_dict(item.trajectory), repr(item.session), repr(exchanges)


# Sessions to export


async def export_samples(exporter: Exporter, folder: Path) -> bytes:
    """What an exporter makes of the sample sessions. Their store is kept in `folder`."""
    return write_items(exporter, await select_samples(exporter, folder))


async def select_samples(exporter: Exporter, folder: Path) -> list[SessionItem]:
    """The sample sessions that an exporter can take."""
    store = await record_samples(folder / "polar.db")
    try:
        found = select_items(store, Selection(), exporter.needs, prefix_merging, ExportTally())
        return [item async for item in found]
    finally:
        await store.close()


def write_items(exporter: Exporter, items: Iterable[SessionItem]) -> bytes:
    return b"".join([*map(exporter.feed, items), exporter.finish()])


_ASK = {"role": "user", "content": "Which files are there? Größe, 東京 🙂"}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
_CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "notes.txt"}


async def record_samples(path: Path) -> RelationalStore:
    """A store with sessions of every sort: good, bad and unfinished ones of one task, one with a sub-agent, one whose
    engine told no log-probabilities, one that trains nothing."""
    store = open_sqlite_store(path)
    good, bad = _solve("good", "notes.txt"), _solve("bad", "There are none.")
    delegating = _solve("delegating", "notes.txt")
    delegating.call([{"role": "user", "content": "You look into files."}], said("I did."), role="subagent")
    silent = Talk("silent")
    silent.call([_ASK], said("None."), logprobs=None, logprob_kind="none")
    aborted = Talk("aborted")
    aborted.call([_ASK], said("No"), untrainable="aborted")
    await _record(store, 0, good, reward=1.0)
    await _record(store, 1, bad, reward=0.0)
    await _record(store, 2, delegating, task_id="delegation", reward=0.5)
    await _record(store, 3, silent, task_id="silence", reward=1.0)
    await _record(store, 4, aborted, task_id="abort", reward=1.0)
    await _record(store, 5, _solve("cut", "notes"), reason="timeout")
    return store


def _solve(session_id: str, answer: str) -> Talk:
    """Two turns, of which the first calls a tool."""
    talk = Talk(session_id)
    calling: list[Part] = [Text("I look."), ToolCall("call_1", "bash", '{"command": "ls"}')]
    first = talk.call([_ASK], calling, finish_reason="tool_calls")
    before = talk.exchanges[0]
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    talk.call([_ASK, _CALLED, _RESULT], said(answer), parent=first)
    again = talk.exchanges[1]
    extended = np.concatenate([before.prompt_ids, before.sampled_ids, np.array([7, 8], np.int32)])
    talk.exchanges[1] = msgspec.structs.replace(again, prompt_ids=extended)
    return talk


async def _record(
    store: RelationalStore,
    index: int,
    talk: Talk,
    *,
    task_id: str = "listing",
    reward: float | None = None,
    reason: str | None = None,
) -> None:
    begun = _START + 60 * index
    metadata = {"task_id": task_id, "model": "m", "sample": index, "roles": talk.roles}
    session = Session(talk.session_id, talk.session_id.encode(), begun, metadata=metadata, reward=reward, reason=reason)
    session.status, session.ended_at = "ended", begun + 30
    await store.create_session(session)
    for exchange in talk.exchanges:
        await store.append(exchange)

"""The contract of every exporter:

    class TestMine(ExporterContract):
        plugin = Mine

        def read(self, data):                 # formats of text have keeps_tokens = False instead
            for line in data.splitlines():
                row = json.loads(line)
                yield ExportedTrace.make(row["ids"], row["mask"], row["logprobs"], row["reward"])

Sessions come from a real store through the pipeline of `polar export`, so an exporter gets what its `needs` ask for.
What exported traces are read back and compared with for recorded ones, bit for bit.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.export.base import Exporter, ExportNeed, SessionItem
from polar.export.pipeline import ExportTally, Selection, select_items
from polar.records import wire
from polar.records.session import Session
from polar.records.trajectory import Trace
from polar.store.relational import RelationalStore
from polar.store.sqlite import open_sqlite_store
from polar.testing.contract import Contract, requires
from polar.testing.conversations import ConversationBuilder, export_items, make_text_parts
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
    keeps_tokens: ClassVar[bool] = True  # whether the format has token ids, which are read back

    def make_exporter(self) -> Exporter:
        made: Exporter = self.plugin()
        return made

    def read(self, data: bytes) -> Iterable[ExportedTrace]:
        """What stands in an export, in any order."""
        raise NotImplementedError(f"{type(self).__name__} can't read its format: override `read`, or see keeps_tokens.")

    def expect(self, item: SessionItem) -> Iterable[ExportedTrace]:
        """What must stand in an export of this session: its traces. Override it for a format that keeps tokens in
        another form, or not all that is known of them."""
        return map(ExportedTrace.from_trace, item.trajectory.traces)

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
        data = export_items(exporter, items)
        assert isinstance(data, bytes)
        assert data
        assert exporter.rows > 0
        if not exporter.is_binary:
            assert data.endswith(b"\n")
            lines = [json.loads(line, parse_constant=_refuse_constant) for line in data.splitlines()]
            assert len(lines) == exporter.rows

    async def test_the_same_sessions_give_the_same_bytes(self, tmp_path: Path) -> None:
        items = await select_samples(self.make_exporter(), tmp_path)
        assert export_items(self.make_exporter(), items) == export_items(self.make_exporter(), items)

    async def test_sessions_are_left_as_they_are(self, tmp_path: Path) -> None:
        items = await select_samples(self.make_exporter(), tmp_path)
        before = [_snapshot(item) for item in items]
        export_items(self.make_exporter(), items)
        assert [_snapshot(item) for item in items] == before

    def test_without_sessions_there_are_no_rows(self) -> None:
        exporter = self.make_exporter()
        assert isinstance(exporter.finish(), bytes)
        assert exporter.rows == 0

    @requires("keeps_tokens")
    async def test_what_it_wrote_are_the_recorded_traces(self, tmp_path: Path) -> None:
        exporter = self.make_exporter()
        items = await select_samples(exporter, tmp_path)
        exported = Counter(self.read(export_items(exporter, items)))
        assert exported == Counter(trace for item in items for trace in self.expect(item))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _snapshot(item: SessionItem) -> Any:
    exchanges = [(one.exchange_id, one.reply, one.raw_request.fields.keys()) for one in item.exchanges]
    return wire.trajectory_to_dict(item.trajectory), repr(item.session), repr(exchanges)


# Sessions to export


async def export_samples(exporter: Exporter, folder: Path) -> bytes:
    """The export of the sample sessions. Their store is kept in `folder`."""
    return export_items(exporter, await select_samples(exporter, folder))


async def select_samples(exporter: Exporter, folder: Path) -> list[SessionItem]:
    """The sample sessions that an exporter can take."""
    store = await record_samples(folder / "polar.db")
    try:
        found = select_items(store, Selection(), exporter.needs, prefix_merging, ExportTally())
        return [item async for item in found]
    finally:
        await store.close()


_ASK = {"role": "user", "content": "Which files are there? Größe, 東京 🙂"}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
_CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "notes.txt"}


async def record_samples(path: Path) -> RelationalStore:
    """A store with sessions of every kind: solved, failed and unfinished ones of one task, one with a sub-agent, one
    whose engine reported no log-probabilities, and one without trainable tokens."""
    store = open_sqlite_store(path)
    good, bad = _make_two_turns("good", "notes.txt"), _make_two_turns("bad", "There are none.")
    delegating = _make_two_turns("delegating", "notes.txt")
    delegating.add_call(
        [{"role": "user", "content": "You look into files."}], make_text_parts("I did."), role="subagent"
    )
    silent = ConversationBuilder("silent")
    silent.add_call([_ASK], make_text_parts("None."), logprobs=None, logprob_kind="none")
    aborted = ConversationBuilder("aborted")
    aborted.add_call([_ASK], make_text_parts("No"), untrainable="aborted")
    await _record_session(store, 0, good, reward=1.0)
    await _record_session(store, 1, bad, reward=0.0)
    await _record_session(store, 2, delegating, task_id="delegation", reward=0.5)
    await _record_session(store, 3, silent, task_id="silence", reward=1.0)
    await _record_session(store, 4, aborted, task_id="abort", reward=1.0)
    await _record_session(store, 5, _make_two_turns("cut", "notes"), reason="timeout")
    return store


def _make_two_turns(session_id: str, answer: str) -> ConversationBuilder:
    """A session of two turns; the first calls a tool."""
    conversation = ConversationBuilder(session_id)
    calling: list[Part] = [Text("I look."), ToolCall("call_1", "bash", '{"command": "ls"}')]
    first = conversation.add_call([_ASK], calling, finish_reason="tool_calls")
    before = conversation.exchanges[0]
    assert before.prompt_ids is not None
    assert before.sampled_ids is not None
    conversation.add_call([_ASK, _CALLING, _RESULT], make_text_parts(answer), parent=first)
    again = conversation.exchanges[1]
    extended = np.concatenate([before.prompt_ids, before.sampled_ids, np.array([7, 8], np.int32)])
    conversation.exchanges[1] = msgspec.structs.replace(again, prompt_ids=extended)
    return conversation


async def _record_session(
    store: RelationalStore,
    index: int,
    conversation: ConversationBuilder,
    *,
    task_id: str = "listing",
    reward: float | None = None,
    reason: str | None = None,
) -> None:
    started_at = _START + 60 * index
    metadata = {"task_id": task_id, "model": "m", "sample": index, "roles": conversation.roles}
    session = Session(
        conversation.session_id,
        conversation.session_id.encode(),
        started_at,
        metadata=metadata,
        reward=reward,
        reason=reason,
    )
    session.status, session.ended_at = "ended", started_at + 30
    await store.create_session(session)
    for exchange in conversation.exchanges:
        await store.append(exchange)

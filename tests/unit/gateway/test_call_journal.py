"""The file that says which calls a gateway is answering."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.call_journal import MAX_JOURNAL_BYTES, CallJournal, read_journal
from polar.records.exchange import StartedCall


def make_call(number: int, model: str = "m") -> StartedCall:
    return StartedCall(f"x-{number}", "s", number, "openai_chat", "messages", model, 17.0, 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


def test_calls_that_started_are_read_back_without_closing(path: Path) -> None:
    journal = CallJournal(path)
    calls = [make_call(number, 'm\n"\u2028') for number in range(3)]
    for call in calls:
        journal.start(call)
    assert read_journal(path) == journal.running == calls
    journal.close()


def test_recorded_and_dropped_calls_are_not_running(path: Path) -> None:
    journal = CallJournal(path)
    for number in range(3):
        journal.start(make_call(number))
    journal.mark_recorded("x-0")
    journal.drop("x-1")
    journal.drop("never started")
    assert journal.running == [make_call(2)]
    assert read_journal(path) == [make_call(0), make_call(2)]  # that the first is recorded, the store knows
    journal.close()


def test_no_journal_is_an_empty_one(path: Path) -> None:
    assert read_journal(path) == []


def test_what_is_not_a_line_of_a_journal_is_skipped(path: Path) -> None:
    journal = CallJournal(path)
    journal.start(make_call(0))
    journal.close()
    path.write_bytes(b"\xff\n{}\n" + path.read_bytes() + b'{"exchange_id": "cut')
    assert read_journal(path) == [make_call(0)]


def test_the_file_stays_small(path: Path) -> None:
    journal = CallJournal(path)
    lasting = make_call(-1)
    journal.start(lasting)
    for number in range(5000):
        journal.start(make_call(number))
        journal.mark_recorded(f"x-{number}")
        assert path.stat().st_size <= MAX_JOURNAL_BYTES
    assert read_journal(path)[0] == lasting
    assert journal.running == [lasting]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    journal.close()


def test_many_running_calls_are_all_kept(path: Path) -> None:
    journal = CallJournal(path)
    calls = [make_call(number, "m" * 1000) for number in range(1000)]
    for call in calls:
        journal.start(call)
    assert read_journal(path) == calls
    journal.close()


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_fails_no_call_and_spoils_no_other_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: int
) -> None:
    journal = CallJournal(path)
    journal.start(make_call(0))
    write = os.write

    def fill_disk(file: int, data: bytes) -> int:
        if written:
            return write(file, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fill_disk)
    journal.start(make_call(1))
    journal.start(make_call(2))
    monkeypatch.undo()
    journal.start(make_call(3))
    assert read_journal(path) == [make_call(0), make_call(3)]
    assert journal.running == [make_call(number) for number in range(4)]  # an orderly end records them all the same
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    journal.close()


@given(st.lists(st.tuples(st.sampled_from(["start", "mark_recorded", "drop"]), st.integers(0, 5))))
def test_every_running_call_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "calls.jsonl"
    journal = CallJournal(path)
    journal._limit_bytes = 500
    dropped = set()
    for step, number in steps:
        if step == "start":
            journal.start(make_call(number))
            dropped.discard(number)
        else:
            if step == "drop" and make_call(number) in journal.running:
                dropped.add(number)
            getattr(journal, step)(f"x-{number}")
        left = read_journal(path)
        assert all(call in left for call in journal.running)
        assert not any(make_call(gone) in left for gone in dropped)
    journal.close()

"""`make bench-vllm`: the same sessions on every way, counted as the engine counts, and captures that are whole."""

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.tax.load import StoredExchange
from benchmarks.vllm import benchmark as vllm
from benchmarks.vllm.benchmark import CHAT, GATEWAY, IDS, RoundMeasurement, VllmPlan, VllmReport
from benchmarks.vllm.load import LoadTally, SessionShape
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.engines.scripted.server import TOKENIZER_FOLDER

SHAPE = SessionShape(turns=3, shared_words=20, message_words=5, least_tokens=4, most_tokens=8)
PLAN = VllmPlan(levels=(3,), rounds=1, shape=SHAPE, clients=1, kept=2)
PLAY = Play([ScriptedTurn(text="one two three four five six seven eight nine ten eleven twelve")])


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
async def test_every_way_holds_the_same_sessions(
    stream: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = msgspec.structs.replace(PLAN, shape=msgspec.structs.replace(SHAPE, stream=stream))
    kept: list[int] = []
    async with ScriptedServer(PLAY, model=str(TOKENIZER_FOLDER), drift=0.0) as engine:
        report = await vllm.run(
            plan, engine.url, lambda _: None, data=tmp_path / "data", keep=lambda it: kept.append(len(it.measured))
        )
    assert report.passed
    assert [it.way for it in report.measured] == [CHAT, GATEWAY, IDS]
    assert kept == [1, 2, 3]
    for it in report.measured:
        assert (it.tally.calls, len(it.tally.first_token_ms)) == (9, 9)
        assert 9 * SHAPE.least_tokens <= it.tally.tokens <= 9 * SHAPE.most_tokens
    assert len(report.captured) == 2
    assert (tmp_path / "data").is_dir()
    read = json.loads(vllm.to_json(report))
    assert set(read["ratios"]["3"]) == {CHAT, IDS}
    vllm.print_report(report, Console(width=150))
    assert "through Polar" in capsys.readouterr().out


async def test_failed_calls_are_counted_and_not_hidden() -> None:
    play = Play([ScriptedTurn(text="one two three four five", fail=500)])
    async with ScriptedServer(play, model=str(TOKENIZER_FOLDER)) as engine:
        report = await vllm.run(PLAN, engine.url, lambda _: None)
    assert not report.passed
    assert {it.way: it.tally.errors for it in report.measured} == {CHAT: 3, GATEWAY: 3, IDS: 3}
    assert all(it.tally.first_errors for it in report.measured)


def test_ratios_are_taken_round_by_round() -> None:
    report = VllmReport(PLAN)
    for seconds in (1.0, 2.0):
        report.measured += [
            RoundMeasurement(CHAT, 3, seconds, LoadTally(tokens=100)),
            RoundMeasurement(GATEWAY, 3, seconds, LoadTally(tokens=110)),
            RoundMeasurement(IDS, 3, seconds, LoadTally(tokens=120)),
        ]
    assert vllm.compute_ratios(report, CHAT, 3) == pytest.approx([1.1, 1.1])
    assert [promise.reached for promise in vllm.list_promises(report)] == [True, False]


def test_a_level_that_would_take_too_long_is_foreseen() -> None:
    report = VllmReport(
        PLAN, measured=[RoundMeasurement(way, 16, 10.0, LoadTally(tokens=1)) for way in (CHAT, GATEWAY, IDS)]
    )
    assert vllm.estimate_seconds(VllmReport(PLAN), 16) == 0.0
    assert vllm.estimate_seconds(report, 16) == pytest.approx(30.0)
    assert 30.0 < vllm.estimate_seconds(report, 128) < 8 * 30.0
    assert 15.0 < vllm.estimate_seconds(report, 8) < 30.0


def test_captures_that_are_not_whole_are_counted() -> None:
    first = StoredExchange([1, 2], [3], [-0.5], None, "rendered")
    second = StoredExchange([1, 2, 3, 4], [5], [-0.5], None, "recorded")
    assert vllm.count_incomplete_calls([first, second], turns=2) == 0
    assert vllm.count_incomplete_calls([first], turns=2) == 1
    assert vllm.count_incomplete_calls([first, msgspec.structs.replace(second, continuation="rendered")], turns=2) == 1
    assert vllm.count_incomplete_calls([first, msgspec.structs.replace(second, logprobs=None)], turns=2) == 1

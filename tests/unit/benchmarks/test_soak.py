"""The soak: how it judges what it saw, and that it makes real calls."""

import csv
from pathlib import Path

import pytest

from benchmarks.client import BenchmarkError
from benchmarks.soak import benchmark as soak
from benchmarks.soak.benchmark import SoakPlan, SoakReport, SoakSample


def report(*resident: int) -> SoakReport:
    samples = [SoakSample(500 * (number + 1), number, float(number), each) for number, each in enumerate(resident)]
    return SoakReport(SoakPlan(), samples)


def test_only_growth_of_the_last_half_counts() -> None:
    ramp = [100 + number for number in range(50)]
    assert report(*ramp, *[150] * 50).passed
    assert report(*ramp, *[150] * 50).growth == 0
    assert not report(*ramp, *ramp).passed
    assert not report(*ramp, *[150 + number // 10 for number in range(50)]).passed


def test_one_high_sample_decides_nothing() -> None:
    assert report(*[100] * 99, 110).passed


def test_samples_are_written_and_drawn(tmp_path: Path) -> None:
    measured = report(100_000_000, 120_000_000, 121_000_000, 121_000_000)
    soak.write_csv(measured, tmp_path / "soak.csv")
    rows = list(csv.reader((tmp_path / "soak.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["calls", "sessions", "seconds", "resident"]
    assert rows[2] == ["1000", "1", "1.0", "120000000"]
    for name in ("soak.svg", "soak.png"):
        soak.draw_memory(measured, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_a_turn_is_put_together_from_its_deltas() -> None:
    deltas = (
        b'{"role":"assistant","content":"So "}',
        b'{"content":"be it."}',
        b'{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"bash","arguments":""}}]}',
        b'{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}',
    )
    body = b"".join(b'data: {"choices":[{"delta":%b}]}\n\n' % delta for delta in deltas) + b"data: [DONE]\n\n"
    assert soak.read_stream(body) == {
        "role": "assistant",
        "content": "So be it.",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
    }
    with pytest.raises(BenchmarkError, match="no turn"):
        soak.read_stream(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_small_run() -> None:
    plan = SoakPlan(calls=60, sample_every=10, turns=3, result_words=10, long_turns=10, long_result_words=5)
    measured = await soak.run(plan, lambda _: None)
    assert [sample.calls for sample in measured.samples] == [10, 20, 30, 40, 50, 60]
    assert measured.samples[-1].sessions > 3
    assert all(sample.resident > 10_000_000 for sample in measured.samples)

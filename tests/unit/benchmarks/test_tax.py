"""What the engine tax is made of: the same load on both ways, and figures of whole captures alone."""

import json

import pytest
from rich.console import Console

from benchmarks.client import BenchmarkError
from benchmarks.tax import benchmark as tax
from benchmarks.tax.load import CapturedClient, DirectClient, RoundTotals, StoredExchange, TaxPlan, measure
from polar.client.async_client import AsyncClient
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.engines.scripted.server import TOKENIZER_FOLDER

PLAN = TaxPlan(conversations=2, turns=2, words=5, tokens=8, rounds=2)
PLAY = Play([ScriptedTurn(text="one two three four five six seven eight nine ten")])


async def test_every_way_samples_and_takes_turns(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    async with ScriptedServer(
        PLAY, model=str(TOKENIZER_FOLDER)
    ) as engine:  # it says where its tokenizer is, as vLLM does
        measured = await tax.run(PLAN, None, engine.url, said.append)
    ways = measured.engines["vllm"]
    # Two rounds of two conversations of two turns, each cut at eight tokens.
    assert {name: (done.tokens, len(done.rates)) for name, done in ways.items()} == {
        tax.OFF: (64, 2),
        tax.LOGPROBS: (64, 2),
        tax.ON: (64, 2),
    }
    order = [line.removeprefix("vllm: ").partition(",")[0] for line in said[1:]]
    assert order == [tax.OFF, tax.LOGPROBS, tax.ON, tax.ON, tax.LOGPROBS, tax.OFF]
    told = json.loads(tax.to_json(measured))
    assert set(told["ratios"]["vllm"]) == {tax.OFF, tax.LOGPROBS, tax.ON}
    assert told["promises"] == []
    tax.print_report(measured, Console())
    assert "captured" in capsys.readouterr().out


async def test_both_ways_send_the_same_prompts() -> None:
    async with (
        ScriptedServer(PLAY, model=str(TOKENIZER_FOLDER)) as engine,
        tax.start_gateway(engine.url) as (_, addresses),
        AsyncClient(addresses.control) as client,
        tax.open_connections() as http,
    ):
        captured = CapturedClient(addresses.gateway, client, http)
        await measure(captured, PLAN, 0, RoundTotals())
        sessions = await captured.stored(addresses.control)
        direct = DirectClient(engine.url, tax.find_between(sessions), logprobs=False)
        await measure(direct, PLAN, 0, RoundTotals())
        await direct.close()
    assert [first.prompt_ids for first, _ in sessions] == direct.prompts
    for first, second in sessions:
        assert first.prompt_ids is not None
        assert first.sampled_ids is not None
        assert second.prompt_ids == [*first.prompt_ids, *first.sampled_ids, *tax.find_between(sessions)]


def test_a_ratio_is_of_tokens_a_second() -> None:
    report = tax.TaxReport(
        PLAN, {"embedded": {tax.OFF: RoundTotals(), tax.LOGPROBS: RoundTotals(), tax.ON: RoundTotals()}}
    )
    for way, seconds in ((tax.OFF, 1.0), (tax.LOGPROBS, 1.0), (tax.ON, 1.25)):
        report.engines["embedded"][way].add(100, seconds)
        report.engines["embedded"][way].add(300, 3 * seconds)
    assert tax.compute_ratio(report, "embedded") == pytest.approx(0.8)
    (promise,) = tax.list_promises(report)
    assert not promise.reached


def test_figures_of_a_gateway_that_kept_less_are_none() -> None:
    whole = StoredExchange([1, 2], [3], [-0.5], None, "rendered")
    gone_on = StoredExchange([1, 2, 3, 4], [5], [-0.5], None, "recorded")
    tax.check_capture([[whole, gone_on]], PLAN)
    assert tax.find_between([[whole, gone_on]]) == [4]
    short = StoredExchange([1, 2, 3, 4], [5], None, None, "recorded")
    for broken in ([whole], [whole, whole], [whole, short]):
        with pytest.raises(BenchmarkError):
            tax.check_capture([broken], PLAN)

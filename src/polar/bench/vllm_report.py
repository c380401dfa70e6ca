"""What `polar bench vllm` measured, against what is promised."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.gateway_report import Promise, describe_machine
from polar.bench.vllm import CHAT, GATEWAY, IDS, WAYS, RoundMeasurement, VllmReport
from polar.bench.vllm_load import WayName

PROMISED: dict[WayName, float] = {CHAT: 1.0, IDS: 0.95}
"""Tokens a second through the gateway against another way's, at every level."""
_TITLES = {CHAT: "the engine's chat API", GATEWAY: "through Polar, captured", IDS: "ids straight to the engine"}


def compute_ratios(report: VllmReport, against: WayName, level: int) -> list[float]:
    """Round by round: what else the machine does changes slowly."""
    pairs = zip(
        report.find_rounds(GATEWAY, level), report.find_rounds(against, level), strict=False
    )  # a run may end within a round
    return [gateway.rate / other.rate for gateway, other in pairs if other.tally.tokens]


def list_promises(report: VllmReport) -> list[Promise]:
    found = []
    for level in report.plan.levels:
        for against, least in PROMISED.items():
            if all_of_them := compute_ratios(report, against, level):
                kept = median(all_of_them)
                measured = f"{kept:.3f} (rounds: {min(all_of_them):.3f} to {max(all_of_them):.3f})"
                what = f"{level} sessions, against {_TITLES[against]}"
                found.append(Promise(what, f"at least {least}", measured, kept >= least))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def as_json(report: VllmReport) -> bytes:
    rounds = [_round(it) for it in report.measured]
    found = {
        str(level): {against: compute_ratios(report, against, level) for against in PROMISED}
        for level in report.plan.levels
    }
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "plan": report.plan,
            "model": report.model,
            "rounds": rounds,
            "ratios": found,
            "promises": list_promises(report),
            "captured": report.captured,
            "left_out": report.left_out,
        }
    )


def _round(it: RoundMeasurement) -> dict[str, Any]:
    tally = msgspec.structs.asdict(it.tally)
    times = tally.pop("first_token_ms")
    return {
        "way": it.way,
        "sessions": it.sessions,
        "seconds": it.seconds,
        "tokens_per_second": it.rate,
        "first_token_p50_ms": percentile(times, 0.5),
        "first_token_p99_ms": percentile(times, 0.99),
        "gateway_cpu": it.gateway_cpu,
        "not_whole": it.not_whole,
        **tally,
    }


def show(report: VllmReport, console: Console) -> None:
    shape = report.plan.shape
    title = (
        f"{report.model}: sessions of {shape.turns} turns, {shape.least_tokens} to {shape.most_tokens} sampled tokens "
        f"each, {shape.shared_words:,} shared words, {shape.message_words} new words a turn"
    )
    table = Table(title=title, title_justify="left")
    first = "first token" if shape.stream else "reply"
    table.add_column("sessions", justify="right")
    table.add_column("")
    for column in (
        "tokens/s",
        "by round",
        "Polar / it",
        f"{first} p50, ms",
        "p99, ms",
        "prompt tokens",
        "errors",
        "gateway's cores",
    ):
        table.add_column(column, justify="right")
    for level in report.plan.levels:
        for row in _rows(report, level):
            table.add_row(*row)
        table.add_section()
    console.print(table)
    for line in report.left_out:
        console.print(f"Left out: {line}.", highlight=False)
    if broken := sum(it.not_whole for it in report.measured):
        console.print(f"[red]{broken} captured calls are not whole[/]", highlight=False)
    for promise in list_promises(report):
        reached = "[green]reached[/]" if promise.reached else "[red]not reached[/]"
        console.print(f"{promise.what}: {promise.measured}, promised {promise.promised}: {reached}", highlight=False)


def _rows(report: VllmReport, level: int) -> Iterator[tuple[str, ...]]:
    for way in WAYS:
        measured = report.find_rounds(way, level)
        if not measured:
            continue
        tokens, seconds = sum(it.tally.tokens for it in measured), sum(it.seconds for it in measured)
        times = [ms for it in measured for ms in it.tally.first_token_ms]
        against = compute_ratios(report, way, level) if way != GATEWAY else []
        yield (
            str(level),
            _TITLES[way],
            f"{tokens / seconds:,.0f}",
            " ".join(f"{it.rate:,.0f}" for it in measured),
            f"{median(against):.3f}" if against else "",
            f"{percentile(times, 0.5):,.0f}",
            f"{percentile(times, 0.99):,.0f}",
            f"{sum(it.tally.prompt_tokens for it in measured):,}",
            str(sum(it.tally.errors for it in measured)),
            f"{sum(it.gateway_cpu for it in measured) / seconds:.2f}" if way == GATEWAY else "",
        )

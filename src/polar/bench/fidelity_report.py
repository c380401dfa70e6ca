"""What `polar bench fidelity` counted, whether it is as promised, and how it is shown."""

from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from polar.bench.fidelity import BASELINE, FidelityReport, SessionFidelity
from polar.bench.fidelity_counts import FidelityCounts
from polar.bench.fidelity_sessions import BUILT_IN, DRIFT
from polar.bench.gateway_report import Promise, describe_machine, promise_table

ECHO_WHOLE = frozenset({BUILT_IN, "pi", "codex", "claude_code", "qwen_code"})
"""Harnesses that send the model's turns back with all that they said, thinking included."""


def list_promises(report: FidelityReport) -> Iterator[Promise]:
    own = [it for measured in report.measured for it in _own(measured)]
    if not own:
        return
    wrong = sum(max(it.wrong_context, it.wrong_logprob) for it in own)
    yield Promise("tokens trained in a context they were not sampled in", "none", f"{wrong:,}", wrong == 0)
    lost = sum(it.lost for it in own)
    yield Promise("tokens neither trained nor excluded with a reason", "none", f"{lost:,}", lost == 0)
    trees = [it for it in own if it.builder == "prefix_tree"]
    extra = sum(it.computed - it.unique for it in trees)
    yield Promise("tokens that prefix_tree computes twice", "none", f"{extra:,}", extra == 0)
    whole = [it for it in report.measured if it.mode == "auto" and not it.dropped and it.harness in ECHO_WHOLE]
    for measured in whole:
        traces = _of(measured, "prefix_merging").traces
        what = f"{measured.harness}, auto: traces of {measured.agents} {_agents(measured.agents)}"
        yield Promise(what, str(measured.agents), str(traces), traces == measured.agents)


def as_json(report: FidelityReport) -> bytes:
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "drift": DRIFT,
            **msgspec.structs.asdict(report),
            "promises": list(list_promises(report)),
        }
    )


def show(report: FidelityReport, console: Console) -> None:
    console.print(_table(report, dropped=False))
    console.print(_table(report, dropped=True))
    for what, why in report.failed.items():
        console.print(f"{what} was not counted: {why}.", highlight=False)
    console.print(promise_table(list_promises(report)))


def _table(report: FidelityReport, *, dropped: bool) -> Table:
    title = f"{report.turns} turns, every {1 / DRIFT:.0f}th word drifts{', one reply dropped' if dropped else ''}"
    caption = (
        "wrong: of the tokens that train, those in a context they were not sampled in; lost: of the tokens delivered, "
        "those neither trained nor excluded with a reason; traces: prefix_merging's; computed: for each unique token"
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("harness", no_wrap=True)
    table.add_column("prompts", no_wrap=True)
    columns = "calls", "baseline wrong", "baseline lost", "Polar wrong", "Polar lost", "traces / agents"
    for name in (*columns, "computed per_request", "prefix_ merging", "prefix_ tree"):
        table.add_column(name, justify="right")
    harness = None
    for measured in report.measured:
        if measured.dropped != dropped:
            continue
        if harness not in (None, measured.harness):
            table.add_section()
        name, harness = "" if measured.harness == harness else measured.harness, measured.harness
        table.add_row(name, measured.mode, *_figures(measured))
    return table


def _figures(measured: SessionFidelity) -> Iterator[str]:
    baseline, own = _of(measured, BASELINE), list(_own(measured))
    yield str(measured.calls)
    yield _share(baseline.wrong_context, baseline.trained)
    yield _share(baseline.lost, measured.delivered)
    yield _share(_most(max(it.wrong_context, it.wrong_logprob) for it in own), own[0].trained)
    yield _share(_most(it.lost for it in own), measured.delivered)
    yield f"{_of(measured, 'prefix_merging').traces} / {measured.agents}"
    for builder in ("per_request", "prefix_merging", "prefix_tree"):
        found = _of(measured, builder)
        yield f"{found.computed / found.unique:.1f}" if found.unique else ""


def _own(measured: SessionFidelity) -> Iterator[FidelityCounts]:
    return (it for it in measured.counts if it.builder != BASELINE)


def _of(measured: SessionFidelity, builder: str) -> FidelityCounts:
    return next(it for it in measured.counts if it.builder == builder)


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else "0"


def _agents(count: int) -> str:
    return "agent" if count == 1 else "agents"

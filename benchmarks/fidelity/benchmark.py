"""`make bench-fidelity`: is what we train on what was sampled, with real harnesses?

    harness x mode x (whole | one reply dropped) -> recorded session -> each builder's data -> counts

The same recorded sessions go through a baseline that merges by comparing prompts (prompt_merging.py) and through
our builders. Sessions in mode `engine` are what a gateway records that speaks chat with its engine: there every prompt
is re-tokenised text.
"""

import gc
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError
from benchmarks.command_line import CountedProgress, json_option, make_console, open_progress_bar, tokenizer_option
from benchmarks.fidelity import counts as counts
from benchmarks.fidelity import prompt_merging
from benchmarks.fidelity.counts import FidelityCounts
from benchmarks.fidelity.sessions import (
    BUILT_IN,
    DRIFT,
    HARNESS_FOLDERS,
    MODES,
    Agent,
    Mode,
    RecordedSession,
    find_installed_agents,
    make_engine,
    record,
)
from benchmarks.process import run_async
from benchmarks.report import Promise, describe_machine, make_promise_table
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.trajectory import builders
from polar.trajectory.session import read_session_paths

BASELINE = prompt_merging.NAME


class SessionFidelity(Struct):
    """One recorded session under every builder."""

    harness: str
    mode: Mode
    dropped: bool
    calls: int
    agents: int  # whose turns train
    sampled: int  # tokens
    delivered: int
    counts: list[FidelityCounts]
    branches: dict[str, int]  # calls by the reason of their branch
    excluded: dict[str, int]  # tokens by reason


class FidelityReport(Struct):
    tokenizer: str | None
    turns: int
    measured: list[SessionFidelity] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # recordings that came to nothing, and why


async def run(
    agents: Sequence[Agent],
    *,
    turns: int,
    tokenizer: str | None,
    progress: CountedProgress,
    modes: Sequence[Mode] = MODES,
) -> FidelityReport:
    report = FidelityReport(tokenizer, turns)
    recordings = [(agent, drops, mode) for drops in (False, True) for agent in agents for mode in modes]
    model = tokenizer or str(TOKENIZER_FOLDER)
    async with make_engine(turns, model, drops=False) as quick, make_engine(turns, model, drops=True) as slow:
        for number, (agent, drops, mode) in enumerate(recordings):
            what = f"{agent.name}, {mode}{', one reply dropped' if drops else ''}"
            progress(what, number, len(recordings))
            url = slow.url if drops else quick.url
            try:
                with tempfile.TemporaryDirectory(prefix="polar-bench-", ignore_cleanup_errors=True) as name:
                    recorded = await record(
                        agent, mode, url, drops=drops, turns=turns, tokenizer=model, folder=Path(name)
                    )
            except BenchmarkError as error:
                report.failed[what] = str(error)
                continue
            report.measured.append(measure(recorded, agent.name, mode, dropped=drops))
            gc.collect()  # what a gateway with its tokenizer leaves behind is large, and full of cycles
    progress("done", len(recordings), len(recordings))
    return report


def measure(recorded: RecordedSession, harness: str, mode: Mode, *, dropped: bool) -> SessionFidelity:
    exchanges = recorded.exchanges
    session = read_session_paths(recorded.session, exchanges)
    built = [
        prompt_merging.build(exchanges),
        counts.build_session_from_traces(builders.per_request(session)),
        counts.build_session_from_traces(builders.prefix_merging(session)),
        counts.build_session_from_tree(builders.prefix_tree([session])),
    ]
    excluded: Counter[str] = Counter()
    for path in session.paths:
        for reason in path.excluded:
            excluded[reason.reason] += reason.stop - reason.start
    return SessionFidelity(
        harness=harness,
        mode=mode,
        dropped=dropped,
        calls=len(exchanges),
        agents=len({path.agent_id for path in session.paths if path.num_trainable}),
        sampled=sum(len(path.sampled) for path in session.paths),
        delivered=sum(exchange.delivered for exchange in exchanges),
        counts=[counts.count_tokens(one, exchanges) for one in built],
        branches=dict(Counter(it.branch_reason for it in exchanges if it.branch_reason is not None)),
        excluded=dict(excluded),
    )


# Promises and tables

ECHO_WHOLE = frozenset({BUILT_IN, "pi", "codex", "claude_code", "qwen_code"})
"""Harnesses that send the model's turns back with all that they said, thinking included."""


def list_promises(report: FidelityReport) -> Iterator[Promise]:
    own = [it for measured in report.measured for it in _select_own(measured)]
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
        traces = _find_counts(measured, "prefix_merging").traces
        what = f"{measured.harness}, auto: traces of {measured.agents} {_format_agents(measured.agents)}"
        yield Promise(what, str(measured.agents), str(traces), traces == measured.agents)


def to_json(report: FidelityReport) -> bytes:
    return msgspec.json.encode(
        {
            "machine": describe_machine(),
            "drift": DRIFT,
            **msgspec.structs.asdict(report),
            "promises": list(list_promises(report)),
        }
    )


def print_report(report: FidelityReport, console: Console) -> None:
    console.print(_make_table(report, dropped=False))
    console.print(_make_table(report, dropped=True))
    for what, why in report.failed.items():
        console.print(f"{what} was not counted: {why}.", highlight=False)
    console.print(make_promise_table(list_promises(report)))


def _make_table(report: FidelityReport, *, dropped: bool) -> Table:
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
        table.add_row(name, measured.mode, *_format_figures(measured))
    return table


def _format_figures(measured: SessionFidelity) -> Iterator[str]:
    baseline, own = _find_counts(measured, BASELINE), list(_select_own(measured))
    yield str(measured.calls)
    yield _format_share(baseline.wrong_context, baseline.trained)
    yield _format_share(baseline.lost, measured.delivered)
    yield _format_share(_find_largest(max(it.wrong_context, it.wrong_logprob) for it in own), own[0].trained)
    yield _format_share(_find_largest(it.lost for it in own), measured.delivered)
    yield f"{_find_counts(measured, 'prefix_merging').traces} / {measured.agents}"
    for builder in ("per_request", "prefix_merging", "prefix_tree"):
        found = _find_counts(measured, builder)
        yield f"{found.computed / found.unique:.1f}" if found.unique else ""


def _select_own(measured: SessionFidelity) -> Iterator[FidelityCounts]:
    return (it for it in measured.counts if it.builder != BASELINE)


def _find_counts(measured: SessionFidelity, builder: str) -> FidelityCounts:
    return next(it for it in measured.counts if it.builder == builder)


def _find_largest(values: Iterable[int]) -> int:
    return max(values, default=0)


def _format_share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else "0"


def _format_agents(count: int) -> str:
    return "agent" if count == 1 else "agents"


# The command


@click.command("fidelity")
@click.option("--harness", "harnesses", multiple=True, help="Run this harness only; may be repeated [default: all].")
@click.option("--turns", default=20, show_default=True, type=click.IntRange(min=4), help="Play so many turns.")
@tokenizer_option
@json_option
def command(harnesses: tuple[str, ...], turns: int, tokenizer: Path | None, as_json: bool) -> None:
    """Count tokens trained in a wrong context, and tokens lost, with real harnesses, against merging by prompts.

    Harnesses are looked for on PATH and where `make` installs them; a small agent, `built-in`, is always there.
    """
    agents = find_installed_agents(harnesses, HARNESS_FOLDERS)
    folder = None if tokenizer is None else str(tokenizer)
    with open_progress_bar() as progress:
        measured = run_async(run(agents, turns=turns, tokenizer=folder, progress=progress))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())

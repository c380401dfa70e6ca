"""polar verify: the invariant on stored sessions, and on what every builder makes of them.

Sessions are read one by one, so memory is that of the largest. Each is checked as its rows are, then built with all
builders and checked again; with a model at hand, its log-probabilities are recomputed as well.

With --from, files of rollouts that others made are audited instead: see `verify_files`.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from polar.audit.audit import audit
from polar.audit.formats import FORMATS
from polar.cli import verify_files
from polar.cli.common import config_option, data_option, json_option, load_settings, run_async
from polar.cli.show import open_existing_store
from polar.cli.show_tokens import escape_controls
from polar.config import Settings
from polar.errors import ConfigError, PolarError, StoreError
from polar.records.exchange import Exchange
from polar.records.session import Session
from polar.records.trajectory import SessionPaths
from polar.rendering.tokenizer import Tokenizer
from polar.store.base import Store
from polar.trajectory import session as sessions
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree
from polar.trajectory.roles import RoleOverrides
from polar.trajectory.teacher import LargestDifference, LogprobComparison, Teacher, find_logprob_conditions
from polar.trajectory.verify import Problem, RecordedSession, check_records, check_trajectory, check_tree

T = TypeVar("T")

DEFAULT_TOLERANCE = 1e-4
"""What fp32 allows: an engine's log-probabilities differ from a forward pass by some 1e-5."""
_MAX_PRINTED_PROBLEMS, _MAX_LISTED_PROBLEMS = 20, 1000
"""Problems that are printed, and that `--json` lists; all are counted."""
_PROGRESS_DELAY_SECONDS = 2.0
"""Seconds before there is a progress bar."""


@click.command("verify")
@config_option
@data_option
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Recompute the log-probabilities with the model in this folder, in fp32.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=DEFAULT_TOLERANCE,
    show_default=True,
    help="With --model: accept differences up to this (with --from: mean differences of first turns). The default is "
    "for engines in fp32; bf16 needs about 0.1.",
)
@click.option("--policy-version", type=int, help="With --model: compare only tokens that this version sampled.")
@click.option(
    "--from",
    "trainer",
    type=click.Choice(list(FORMATS)),
    help="Audit files of this trainer's rollouts instead of stored sessions.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="With --from: set the temperature of the recorded log-probabilities.",
)
@json_option
@click.argument("names", nargs=-1, metavar="[SESSION|FILE]...")
def command(
    names: tuple[str, ...],
    config_path: Path | None,
    data: Path,
    folder: Path | None,
    tolerance: float,
    policy_version: int | None,
    trainer: str | None,
    temperature: float,
    as_json: bool,
) -> int:
    """Check sessions (default: all) token by token: the records, and the traces of every builder.

    With --from TRAINER, check FILEs of rollouts made by any tool: is every token trained in the context in which it was
    sampled?
    """
    if trainer is None and (files := [name for name in names if Path(name).is_file()]):
        raise ConfigError(f"{files[0]} is a file: name its trainer's format with --from {'|'.join(FORMATS)}.")
    rows = None if trainer is None else verify_files.read_files(trainer, names)  # before a model is loaded
    teacher = None if folder is None else Teacher.load(folder)
    tokenizer = None if folder is None or not (folder / "tokenizer.json").exists() else Tokenizer.load(folder)
    if rows is not None:
        audited = audit(
            rows,
            teacher,
            tolerance=tolerance,
            temperature=temperature,
            version=policy_version,
            track=partial(track_progress, "rows"),
        )
        return verify_files.print_audit(audited, rows, tokenizer, as_json=as_json)
    findings = run_async(verify_sessions(load_settings(config_path), data, names, teacher, policy_version))
    return print_findings(findings, tolerance, tokenizer, as_json=as_json)


def print_findings(
    findings: "VerifyFindings",
    tolerance: float = DEFAULT_TOLERANCE,
    tokenizer: Tokenizer | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Prints what was found; the exit status."""
    complaint = findings.describe_failure(tolerance)
    if as_json:
        click.echo(msgspec.json.encode(_findings_to_dict(findings, tolerance, tokenizer, ok=complaint is None)))
    else:
        _print_findings(findings, tokenizer, Console(), "No problems" if complaint is None else "Problems")
    if complaint is not None:
        click.echo(f"polar: {complaint}", err=True)
        return 1
    return 0


class VerifyFindings(Struct):
    """Over all sessions that were looked at."""

    sessions: int = 0
    exchanges: int = 0
    sampled: int = 0
    trainable: int = 0
    excluded: Counter[str] = field(default_factory=Counter)  # tokens by reason
    traces: Counter[str] = field(default_factory=Counter)  # by builder
    nodes: int = 0  # of prefix_tree
    computed: Counter[str] = field(default_factory=Counter)  # tokens by builder
    branches: Counter[str] = field(default_factory=Counter)  # exchanges by reason
    without_checksum: int = 0  # exchanges that an older version stored
    problems: list[Problem] = field(default_factory=list)  # the first ones
    problem_counts: Counter[str] = field(default_factory=Counter)  # of all problems
    num_faulty: int = 0  # sessions with problems
    comparison: LogprobComparison | None = None

    def add(self, problems: Sequence[Problem]) -> None:
        self.num_faulty += bool(problems)
        self.problem_counts.update(problem.kind for problem in problems)
        self.problems += problems[: max(0, _MAX_LISTED_PROBLEMS - len(self.problems))]

    def describe_failure(self, tolerance: float) -> str | None:
        """What is wrong, in a sentence."""
        if self.problems:
            first = self.problems[0]
            where = f"session {first.session_id}" + (f", exchange {first.exchange_id}" if first.exchange_id else "")
            return (
                f"{_format_count(self.problem_counts.total(), 'problem')} in {self.num_faulty} of "
                f"{_format_count(self.sessions, 'session')}; "
                f"the first is in {where}: {first.message.rstrip('.')}."
            )
        compared = self.comparison
        if compared is None:
            return None
        if not compared.tokens:
            return f"No log-probability could be compared ({_format_counts(compared.skipped) or 'nothing trains'})."
        if not compared.largest <= tolerance:
            return (
                f"The model's log-probabilities differ from the recorded ones by up to {compared.largest:.3g}, more "
                f"than {tolerance:g}: is it of another policy version (--policy-version), or the engine in bf16 "
                f"(--tolerance)?"
            )
        return None


async def verify_sessions(
    settings: Settings,
    data: Path,
    session_ids: Sequence[str],
    teacher: Teacher | None = None,
    policy_version: int | None = None,
) -> VerifyFindings:
    store = open_existing_store(settings, data)
    findings = VerifyFindings(comparison=None if teacher is None else LogprobComparison())
    try:
        selected = session_ids or [session.session_id async for session in _iterate_sessions(store)]
        for session_id in track_progress("sessions", selected):
            await _verify_session(store, session_id, findings, teacher, policy_version)
    finally:
        await store.close()
    if not findings.sessions:
        raise ConfigError(f"Nothing has been captured in {data} yet: try `polar capture -- YOUR-AGENT`.")
    return findings


async def _iterate_sessions(store: Store) -> AsyncIterator[Session]:
    """Newest first."""
    page = await store.list_sessions()
    while page:
        for session in page:
            yield session
        page = await store.list_sessions(before=page[-1].session_id)


async def _verify_session(
    store: Store, session_id: str, findings: VerifyFindings, teacher: Teacher | None, policy_version: int | None
) -> None:
    session = await store.find_session(session_id)
    if session is None:
        raise ConfigError(f"There is no session {session_id}.")
    findings.sessions += 1
    try:
        exchanges = [exchange async for exchange in store.read_exchanges(session_id)]
    except (StoreError, ValueError) as error:  # a ValueError: bytes that are no array any more
        findings.add([Problem(session_id, None, "unreadable", str(error))])
        return
    for exchange in exchanges:
        findings.exchanges += 1
        findings.sampled += 0 if exchange.sampled_ids is None else len(exchange.sampled_ids)
        findings.without_checksum += exchange.checksum is None
        if exchange.branch_reason is not None:
            findings.branches[exchange.branch_reason] += 1
    problems = check_records(exchanges, vocabulary_size=None if teacher is None else teacher.vocabulary_size)
    if not problems:  # of rows that are not in order nothing can be built that would be
        try:
            sampled = sessions.read_session_paths(session, exchanges)
        except PolarError as error:
            findings.add([Problem(session_id, None, "unreadable", str(error))])
            return
        problems = _check_builds(session, exchanges, sampled, findings, teacher, policy_version)
    findings.add(problems)


def _check_builds(
    session: Session,
    exchanges: Sequence[Exchange],
    sampled: SessionPaths,
    findings: VerifyFindings,
    teacher: Teacher | None,
    policy_version: int | None,
) -> list[Problem]:
    trainable_roles = RoleOverrides.from_metadata(session.metadata).trainable_roles
    recorded = RecordedSession(session, exchanges, sampled.paths, trainable_roles=trainable_roles)
    problems: list[Problem] = []
    merged = prefix_merging(sampled)
    for built in (per_request(sampled), merged):
        problems += check_trajectory(recorded, built)
        findings.traces[built.builder] += len(built.traces)
        findings.computed[built.builder] += built.tokens.computed
    tree = prefix_tree([sampled])
    problems += check_tree([recorded], tree)
    findings.nodes += len(tree.parents)
    findings.computed["prefix_tree"] += tree.tokens.computed
    findings.trainable += recorded.num_trainable
    for excluded in merged.excluded:
        findings.excluded[excluded.reason] += excluded.stop - excluded.start
    if teacher is not None and findings.comparison is not None and not problems:
        with_images = {path.exchange_id for path in sampled.paths if path.images}
        conditions = {
            exchange.exchange_id: find_logprob_conditions(exchange, images=exchange.exchange_id in with_images)
            for exchange in exchanges
        }
        teacher.compare(merged.traces, conditions, findings.comparison, policy_version=policy_version)
    return problems


def track_progress(what: str, items: Sequence[T]) -> Iterator[T]:
    """Gives them on, with a progress bar: on a terminal, once it has taken a while."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=len(items))
    due = time.monotonic() + _PROGRESS_DELAY_SECONDS
    try:
        for item in items:
            yield item
            progress.advance(task)
            if time.monotonic() > due:
                progress.start()
    finally:
        progress.stop()


# What is printed


def _print_findings(findings: VerifyFindings, tokenizer: Tokenizer | None, console: Console, title: str) -> None:
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="left")
    rows: dict[str, Any] = {
        "sessions": findings.sessions,
        "exchanges": findings.exchanges,
        "sampled tokens": findings.sampled,
        "trainable": findings.trainable,
        "excluded": _format_counts(findings.excluded) or 0,
        "traces": f"{_format_counts(findings.traces)} (prefix_tree: {_format_count(findings.nodes, 'node')})",
        "computed tokens": _format_counts(findings.computed),
        "branches": _format_counts(findings.branches) or 0,
    }
    if findings.without_checksum:
        rows["no checksum"] = (
            f"{_format_count(findings.without_checksum, 'exchange')} of an older version: changes can't be seen"
        )
    rows["problems"] = (
        Text(_format_counts(findings.problem_counts), "red") if findings.problem_counts else Text("none", "green")
    )
    compared = findings.comparison
    if compared is not None:
        rows["recomputed"] = f"{_format_count(compared.tokens, 'token')}: largest difference {compared.largest:.3g}"
        rows["recomputed"] += f", mean {compared.mean:.3g}"
        if compared.skipped:
            rows["not comparable"] = _format_counts(compared.skipped)
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, Text) else str(value))
    console.print(table)
    if findings.problems:
        _print_problems(findings, console)
    if compared is not None and compared.worst is not None:
        _print_worst(compared.worst, tokenizer, console)


def _print_problems(findings: VerifyFindings, console: Console) -> None:
    table = Table(title="Problems", title_justify="left")
    for column in ("session", "exchange", "kind", "what"):
        table.add_column(column, overflow="fold")
    for problem in findings.problems[:_MAX_PRINTED_PROBLEMS]:
        table.add_row(problem.session_id, problem.exchange_id or "", problem.kind, Text(problem.message))
    console.print(table)
    if (omitted := findings.problem_counts.total() - _MAX_PRINTED_PROBLEMS) > 0:
        console.print(f"and {omitted} more (--json lists up to {_MAX_LISTED_PROBLEMS})")


def _print_worst(worst: LargestDifference, tokenizer: Tokenizer | None, console: Console) -> None:
    console.print(
        f"Largest difference: sampled token {worst.position} of exchange {worst.exchange_id} "
        f"(session {worst.session_id}, policy {worst.policy_version}): "
        f"recorded {worst.recorded:.6f}, recomputed {worst.recomputed:.6f}",
        highlight=False,
    )
    before, token, after = _decode_surroundings(worst, tokenizer)
    line = (
        Text(escape_controls(before), "dim")
        .append(escape_controls(token), "bold reverse red")
        .append(escape_controls(after), "dim")
    )
    console.print(line)


def _decode_surroundings(worst: LargestDifference, tokenizer: Tokenizer | None) -> tuple[str, str, str]:
    if tokenizer is None:
        before, after = (" ".join(map(str, ids)) for ids in (worst.before, worst.after))
        return f"{before} ", str(worst.id), f" {after}"
    return tokenizer.decode(worst.before), tokenizer.decode_token(worst.id), tokenizer.decode(worst.after)


def _findings_to_dict(
    findings: VerifyFindings, tolerance: float, tokenizer: Tokenizer | None, *, ok: bool
) -> dict[str, Any]:
    compared = findings.comparison
    model = None
    if compared is not None:
        model = {
            "tokens": compared.tokens,
            "largest": compared.largest,
            "mean": compared.mean,
            "tolerance": tolerance,
            "skipped": dict(compared.skipped),
            "worst": None
            if compared.worst is None
            else msgspec.structs.asdict(compared.worst) | {"text": _decode_surroundings(compared.worst, tokenizer)},
        }
    return {
        "ok": ok,
        "sessions": findings.sessions,
        "exchanges": findings.exchanges,
        "sampled": findings.sampled,
        "trainable": findings.trainable,
        "excluded": dict(findings.excluded),
        "traces": dict(findings.traces),
        "nodes": findings.nodes,
        "computed": dict(findings.computed),
        "branches": dict(findings.branches),
        "without_checksum": findings.without_checksum,
        "problem_kinds": dict(findings.problem_counts),
        "problems": findings.problems,
        "model": model,
    }


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")

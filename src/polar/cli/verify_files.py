"""polar verify --from: what an audit of others' rollouts found, for people and for machines."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.audit.audit import AuditReport, RowAudit
from polar.audit.formats import read as rows_of
from polar.audit.rows import PROBLEM_KINDS, RolloutRow
from polar.cli.show_tokens import escape_controls
from polar.errors import ConfigError
from polar.rendering.tokenizer import Tokenizer

_MAX_PRINTED_ROWS, _MAX_LISTED_ROWS = 20, 1000
"""Rows that are printed, and that `--json` lists; all are counted."""
_TOKENS_BEFORE, _TOKENS_AFTER = 20, 4


def read_files(trainer: str, names: Sequence[str]) -> list[RolloutRow]:
    """Of all files, numbered through. Raises ConfigError."""
    if not names:
        raise ConfigError(f"Name a file of {trainer}'s rollouts: polar verify --from {trainer} FILE --model DIR.")
    rows: list[RolloutRow] = []
    for name in names:
        if not Path(name).is_file():
            raise ConfigError(f"There is no file {name}.")
        before = len(rows)
        rows += rows_of(trainer, Path(name))
        for row in rows[before:]:
            row.number += before
    return rows


def print_audit(
    audit_report: AuditReport, rows: Sequence[RolloutRow], tokenizer: Tokenizer | None, *, as_json: bool
) -> int:
    """Prints what was found; the exit status."""
    complaint = audit_report.failure_message
    if as_json:
        click.echo(msgspec.json.encode(_report_to_dict(audit_report, ok=complaint is None)))
    else:
        _print_report(audit_report, rows, tokenizer, Console())
    if complaint is not None:
        click.echo(f"polar: {complaint}", err=True)
        return 1
    return 0


def _print_report(
    audit_report: AuditReport, rows: Sequence[RolloutRow], tokenizer: Tokenizer | None, console: Console
) -> None:
    table = Table(
        show_header=False, title="Problems" if audit_report.failure_message else "No problems", title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column()
    trained, compared, off = _count_tokens(audit_report)
    table.add_row("rows", str(len(audit_report.rows)))
    table.add_row("trained tokens", str(trained))
    if audit_report.policy is None:
        table.add_row("compared", "0: without --model nobody can say in which context tokens were sampled")
    else:
        largest = max(row.largest for row in audit_report.rows)
        table.add_row("compared", f"{compared}: largest difference {largest:.3g}")
        noise = audit_report.policy.noise
        table.add_row("noise", f"first turns differ by {noise.mean:.3g} in the mean")
        share = f" ({off / compared:.1%})" if off else ""
        table.add_row("off", f"{off} by more than {noise.outlier_threshold:.3g}{share}")
    if audit_report.skipped:
        table.add_row("rows not compared", _format_counts(audit_report.skipped))
    table.add_row("rows in order", str(len(audit_report.rows) - len(audit_report.faulty_rows)))
    for kind, count in audit_report.problem_counts.most_common():
        table.add_row(kind, Text(f"{count}: {PROBLEM_KINDS[kind]}", "red"))
    console.print(table)
    if audit_report.faulty_rows:
        _print_rows(audit_report, console)
    if (gravest := audit_report.worst_row) is not None:
        _print_surroundings(gravest, rows[gravest.number - 1], tokenizer, console)


def _print_rows(audit_report: AuditReport, console: Console) -> None:
    table = Table(title="Rows", title_justify="left")
    for name in ("row", "trained", "off", "largest", "token", "turn", "verdict"):
        table.add_column(name, overflow="fold", justify="left" if name == "verdict" else "right")
    for row in audit_report.faulty_rows[:_MAX_PRINTED_ROWS]:
        gravest = row.problems[0]
        measured = (f"{row.off} ({row.off / row.compared:.0%})", f"{row.largest:.3g}") if row.compared else ("-", "-")
        place = ("" if value is None else str(value) for value in (gravest.position, gravest.turn))
        kinds = ", ".join(dict.fromkeys(problem.kind for problem in row.problems))
        table.add_row(str(row.number), str(row.trained), *measured, *place, kinds)
    console.print(table)
    if (more := len(audit_report.faulty_rows) - _MAX_PRINTED_ROWS) > 0:
        console.print(f"and {more} more (--json lists up to {_MAX_LISTED_ROWS})")


def _print_surroundings(checked: RowAudit, row: RolloutRow, tokenizer: Tokenizer | None, console: Console) -> None:
    position = checked.problems[0].position
    if position is None or tokenizer is None or row.prompt_length + position >= len(row.ids):
        return
    at, ids = row.prompt_length + position, row.ids.tolist()
    console.print(f"Row {row.number}, token {position} of the response:", highlight=False)
    line = Text(escape_controls(tokenizer.decode(ids[max(0, at - _TOKENS_BEFORE) : at])), "dim")
    line.append(escape_controls(tokenizer.decode_token(ids[at])), "bold reverse red")
    console.print(line.append(escape_controls(tokenizer.decode(ids[at + 1 : at + 1 + _TOKENS_AFTER])), "dim"))


def _report_to_dict(audit_report: AuditReport, *, ok: bool) -> dict[str, Any]:
    trained, compared, off = _count_tokens(audit_report)
    listed = [
        msgspec.structs.asdict(row) | {"verdict": row.verdict} for row in audit_report.faulty_rows[:_MAX_LISTED_ROWS]
    ]
    return {
        "ok": ok,
        "rows": len(audit_report.rows),
        "in_order": len(audit_report.rows) - len(audit_report.faulty_rows),
        "trained": trained,
        "compared": compared,
        "off": off,
        "skipped": dict(audit_report.skipped),
        "kinds": dict(audit_report.problem_counts),
        "policy": audit_report.policy,
        "problems": listed,
    }


def _count_tokens(audit_report: AuditReport) -> tuple[int, int, int]:
    return (
        sum(row.trained for row in audit_report.rows),
        sum(row.compared for row in audit_report.rows),
        sum(row.off for row in audit_report.rows),
    )


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())

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

from polar.audit.audit import Checked, Report
from polar.audit.formats import read as rows_of
from polar.audit.rows import KINDS, Row
from polar.cli.show_tokens import visible
from polar.errors import ConfigError
from polar.rendering.tokenizer import Tokenizer

_SHOWN, _KEPT = 20, 1000
"""Rows that are printed, and that `--json` lists; all are counted."""
_BEFORE, _AFTER = 20, 4


def read(trainer: str, names: Sequence[str]) -> list[Row]:
    """Of all files, numbered through. Raises ConfigError."""
    if not names:
        raise ConfigError(f"Name a file of {trainer}'s rollouts: polar verify --from {trainer} FILE --model DIR.")
    rows: list[Row] = []
    for name in names:
        if not Path(name).is_file():
            raise ConfigError(f"There is no file {name}.")
        before = len(rows)
        rows += rows_of(trainer, Path(name))
        for row in rows[before:]:
            row.number += before
    return rows


def report(found: Report, rows: Sequence[Row], tokenizer: Tokenizer | None, *, as_json: bool) -> int:
    """Prints what was found; the exit status."""
    complaint = found.complaint
    if as_json:
        click.echo(msgspec.json.encode(_as_json(found, ok=complaint is None)))
    else:
        _print(found, rows, tokenizer, Console())
    if complaint is not None:
        click.echo(f"polar: {complaint}", err=True)
        return 1
    return 0


def _print(found: Report, rows: Sequence[Row], tokenizer: Tokenizer | None, console: Console) -> None:
    table = Table(show_header=False, title="Problems" if found.complaint else "No problems", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    trained, compared, off = _sums(found)
    table.add_row("rows", str(len(found.rows)))
    table.add_row("trained tokens", str(trained))
    if found.policy is None:
        table.add_row("compared", "0: without --model nobody can say in which context tokens were sampled")
    else:
        largest = max(row.largest for row in found.rows)
        table.add_row("compared", f"{compared}: largest difference {largest:.3g}")
        noise = found.policy.noise
        table.add_row("noise", f"first turns differ by {noise.mean:.3g} in the mean")
        share = f" ({off / compared:.1%})" if off else ""
        table.add_row("off", f"{off} by more than {noise.limit:.3g}{share}")
    if found.skipped:
        table.add_row("rows not compared", _listed(found.skipped))
    table.add_row("rows in order", str(len(found.rows) - len(found.faulty)))
    for kind, count in found.kinds.most_common():
        table.add_row(kind, Text(f"{count}: {KINDS[kind]}", "red"))
    console.print(table)
    if found.faulty:
        _print_rows(found, console)
    if (gravest := found.gravest) is not None:
        _print_place(gravest, rows[gravest.number - 1], tokenizer, console)


def _print_rows(found: Report, console: Console) -> None:
    table = Table(title="Rows", title_justify="left")
    for name in ("row", "trained", "off", "largest", "token", "turn", "verdict"):
        table.add_column(name, overflow="fold", justify="left" if name == "verdict" else "right")
    for row in found.faulty[:_SHOWN]:
        gravest = row.problems[0]
        measured = (f"{row.off} ({row.off / row.compared:.0%})", f"{row.largest:.3g}") if row.compared else ("-", "-")
        place = ("" if value is None else str(value) for value in (gravest.position, gravest.turn))
        kinds = ", ".join(dict.fromkeys(problem.kind for problem in row.problems))
        table.add_row(str(row.number), str(row.trained), *measured, *place, kinds)
    console.print(table)
    if (more := len(found.faulty) - _SHOWN) > 0:
        console.print(f"and {more} more (--json lists up to {_KEPT})")


def _print_place(checked: Checked, row: Row, tokenizer: Tokenizer | None, console: Console) -> None:
    position = checked.problems[0].position
    if position is None or tokenizer is None or row.edge + position >= len(row.ids):
        return
    at, ids = row.edge + position, row.ids.tolist()
    console.print(f"Row {row.number}, token {position} of the response:", highlight=False)
    line = Text(visible(tokenizer.decode(ids[max(0, at - _BEFORE) : at])), "dim")
    line.append(visible(tokenizer.token_text(ids[at])), "bold reverse red")
    console.print(line.append(visible(tokenizer.decode(ids[at + 1 : at + 1 + _AFTER])), "dim"))


def _as_json(found: Report, *, ok: bool) -> dict[str, Any]:
    trained, compared, off = _sums(found)
    listed = [msgspec.structs.asdict(row) | {"verdict": row.verdict} for row in found.faulty[:_KEPT]]
    return {
        "ok": ok,
        "rows": len(found.rows),
        "in_order": len(found.rows) - len(found.faulty),
        "trained": trained,
        "compared": compared,
        "off": off,
        "skipped": dict(found.skipped),
        "kinds": dict(found.kinds),
        "policy": found.policy,
        "problems": listed,
    }


def _sums(found: Report) -> tuple[int, int, int]:
    return (
        sum(row.trained for row in found.rows),
        sum(row.compared for row in found.rows),
        sum(row.off for row in found.rows),
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())

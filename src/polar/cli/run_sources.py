"""How much of what was collected is accepted, by where its tasks are from."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.data.collection import SourceStats


def print_sources(console: Console, rates: Mapping[str, SourceStats], criterion: str) -> None:
    table = Table(title=f"Accepted sessions by source ({criterion})", title_justify="left")
    table.add_column("source", overflow="fold")
    for name in ("tasks", "solved", "sessions", "accepted", "rate"):
        table.add_column(name, justify="right")
    for source, found in sorted(rates.items()):
        table.add_row(
            Text(source),
            str(len(found.tasks)),
            str(len(found.solved)),
            str(found.sessions),
            str(found.accepted),
            f"{found.accepted / found.sessions:.1%}",
        )
    console.print(table)

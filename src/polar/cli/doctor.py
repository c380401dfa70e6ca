"""polar doctor: what works on this machine, and what an engine really does."""

import json
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

import click
from msgspec import structs
from rich.console import Console
from rich.table import Table

from polar.cli.common import json_option, load_settings, run, settings_options
from polar.config import Settings
from polar.engines.pool import Pool
from polar.engines.probe import Finding, probe
from polar.harnesses import load_harness
from polar.plugins import names


@click.command("doctor")
@settings_options
@click.option("--kind", help="the engine's kind [default: from the settings; vllm if a URL is given]")
@json_option
@click.argument("engine_url", required=False)
def command(config_path: Path | None, data: Path, kind: str | None, as_json: bool, engine_url: str | None) -> int:
    """Check this machine; with ENGINE_URL, run the conformance test against that engine."""
    engine: dict[str, object] = {"kind": kind} if kind else {}
    if engine_url:
        engine = {"urls": [engine_url], "kind": kind or "vllm"}
    settings = load_settings(config_path, engine=engine)
    machine = _machine(data)
    found = run(_engines(settings))
    if as_json:
        click.echo(
            json.dumps({"machine": _plain(machine), "engines": {url: _plain(rows) for url, rows in found.items()}})
        )
    else:
        console = Console()
        _print(console, "This machine", machine)
        for url, rows in found.items():
            _print(console, f"Engine {url} ({settings.engine.kind})", rows)
    return 1 if any(row.ok is False for rows in found.values() for row in rows) else 0


async def _engines(settings: Settings) -> dict[str, list[Finding]]:
    pool = await Pool.from_settings(settings.engine)
    try:
        return {replica.url: await probe(replica.engine) for replica in pool.replicas}
    finally:
        await pool.close()


def _machine(data: Path) -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    rows = [Finding("Python", sys.version_info >= (3, 11), version, "3.11 or newer is needed"), _store(data)]
    for name in names("harnesses"):
        harness = load_harness(name)
        path = next((found for command in harness.executables if (found := shutil.which(command))), None)
        command = f"polar capture -- {harness.executables[0]} ..."
        rows.append(
            Finding(
                f"harness {name}",
                path is not None,
                path or "not on PATH",
                command if path else f"install it, then: {command}",
            )
        )
    for tool in ("bwrap", "docker", "podman"):
        path = shutil.which(tool)
        rows.append(Finding(tool, path is not None, path or "not on PATH", "a runtime for sandboxes"))
    return rows


def _store(data: Path) -> Finding:
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data) as folder:
            connection = sqlite3.connect(Path(folder) / "probe.db")
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            connection.execute("CREATE TABLE probe (x)")
            connection.close()
    except (OSError, sqlite3.Error) as error:
        return Finding("store", False, f"{data}: {error}", "choose another folder with --data")
    return Finding("store", mode == "wal", f"SQLite {sqlite3.sqlite_version} in {data}", "captures survive a crash")


_MARKS = {True: "[green]yes[/]", False: "[yellow]no[/]", None: "?"}


def _print(console: Console, title: str, rows: list[Finding]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "check", "seen", "what follows"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(_MARKS[row.ok], row.check, row.seen, row.follows)
    console.print(table)


def _plain(rows: list[Finding]) -> list[dict[str, object]]:
    return [structs.asdict(row) for row in rows]

"""polar doctor: what works on this machine, and what an engine really does."""

import json
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

import click
from msgspec import Struct, structs
from rich.console import Console
from rich.table import Table

from polar.cli.common import json_option, load_settings, run, settings_options
from polar.config import Settings
from polar.engines.pool import Pool
from polar.engines.probe import Finding, probe
from polar.harnesses import load_harness
from polar.harnesses.base import Harness
from polar.harnesses.cache import cache_folder, damage, installed
from polar.plugins import load, names
from polar.private_files import make_private_folder
from polar.runtimes.base import Kind
from polar.runtimes.trial import why_trial_fails


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
    with Console(stderr=True).status("this machine") as status:
        machine = _machine(data)
        status.update("runtimes")
        runtimes = run(_runtimes(settings, data))
        status.update("harnesses")
        harnesses = _harnesses(settings)
        status.update(f"engine {', '.join(settings.engine.urls) or f'of the kind {settings.engine.kind}'}")
        found = run(_engines(settings))
    if as_json:
        shown = {"machine": machine, "harnesses": harnesses}
        told: dict[str, object] = {name: _plain(rows) for name, rows in shown.items()}
        told["runtimes"] = [structs.asdict(row.finding) | {"missing": row.missing} for row in runtimes]
        click.echo(json.dumps(told | {"engines": {url: _plain(rows) for url, rows in found.items()}}))
    else:
        console = Console()
        _print(console, "This machine", machine)
        _print_runtimes(console, runtimes)
        _print(console, "Harnesses", harnesses)
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
    return [Finding("Python", sys.version_info >= (3, 11), version, "3.11 or newer is needed"), _store(data)]


class _TriedRuntime(Struct):
    finding: Finding
    missing: list[str]  # what it does not isolate or limit here


async def _runtimes(settings: Settings, data: Path) -> list[_TriedRuntime]:
    allowed = settings.node.runtimes or names("runtimes")
    logging.getLogger("polar.runtimes").setLevel(logging.ERROR)  # its warnings are in the table
    with tempfile.TemporaryDirectory(dir=data if os.access(data, os.W_OK) else None) as state:
        return [await _runtime(name, Path(state), allowed=name in allowed) for name in names("runtimes")]


async def _runtime(name: str, state: Path, *, allowed: bool) -> _TriedRuntime:
    kind: Kind = load("runtimes", name)(state, _NO_GATEWAY)
    try:
        why = await (why_trial_fails(kind) if allowed else kind.unavailable())
        missing = kind.missing() if why is None and allowed else []
    finally:
        await kind.close()
    if why is not None:
        return _TriedRuntime(Finding(name, False, "can't be made here", why), missing)
    follows = _RUNTIMES.get(name, f'backend = "{name}" in a task')
    if os.geteuid() != 0:
        follows += _WITHOUT_ROOT.get(name, "")
        if any(limit in missing for limit in ("memory limit", "process limit", "CPU limit")):
            follows += "; for its limits: systemd-run --user --scope -p Delegate=yes polar ..."
    if not allowed:
        return _TriedRuntime(Finding(name, False, "works, but is not allowed", "name it in [node] runtimes"), missing)
    return _TriedRuntime(Finding(name, True, "works", follows), missing)


_NO_GATEWAY = "http://127.0.0.1:1"  # nothing asks it
_RUNTIMES = {
    "local": "for code that you trust: nothing is hidden or forbidden",
    "bubblewrap": "the default: a sandbox over this machine's files, or an unpacked image's",
}
_WITHOUT_ROOT = {
    "bubblewrap": "; without root, in a user namespace: all files inside are one user's",
}


def _harnesses(settings: Settings) -> list[Finding]:
    cache = cache_folder(settings.node.harness_cache)
    presets = [load_harness(name) for name in names("harnesses")]
    return [_harness(preset, cache) for preset in presets if preset.package is not None]  # else: nothing is missing


def _harness(preset: Harness, cache: Path) -> Finding:
    """`polar run` takes it from the cache, `polar capture` from PATH."""
    versions = installed(cache, preset.name)
    for one in versions:
        if (wrong := damage(one)) is not None:
            advice = f"polar harness install {preset.name}@{one.version}"
            return Finding(preset.name, False, f"{one.version} in {cache} is damaged: {wrong}", advice)
    path = next((found for command in preset.executables if (found := shutil.which(command))), None)
    seen = ([f"installed: {', '.join(one.version for one in versions)}"] if versions else []) + ([path] if path else [])
    follows = []
    if versions:
        follows.append(f"polar run TASK --harness {preset.name}")
    else:
        follows.append(f"for polar run: polar harness install {preset.name}")
    if path is not None:
        follows.append(f"polar capture -- {preset.executables[0]} ...")
    return Finding(preset.name, bool(seen), "; ".join(seen) or "not installed, not on PATH", "; ".join(follows))


def _store(data: Path) -> Finding:
    try:
        make_private_folder(data)
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


def _print_runtimes(console: Console, rows: list[_TriedRuntime]) -> None:
    table = Table(title="Runtimes: where polar run puts agents; one of each was tried", title_justify="left")
    for column in ("", "runtime", "seen", "not isolated or limited", "what follows"):
        table.add_column(column, overflow="fold")
    for row in rows:
        finding = row.finding
        table.add_row(_MARKS[finding.ok], finding.check, finding.seen, "; ".join(row.missing), finding.follows)
    console.print(table)


def _plain(rows: list[Finding]) -> list[dict[str, object]]:
    return [structs.asdict(row) for row in rows]

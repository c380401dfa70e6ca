"""polar doctor: checks this machine, and runs the conformance test against an engine."""

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

from polar.cli.common import json_option, load_settings, run_async, settings_options
from polar.config import Settings
from polar.engines.pool import EnginePool
from polar.engines.probe import Finding, probe_engine
from polar.folders import make_private_folder
from polar.harnesses.base import Harness
from polar.harnesses.cache import find_cache_folder, find_damage, list_installations
from polar.plugins import list_problems, load_all
from polar.runtimes.base import RuntimeBackend
from polar.runtimes.trial import run_trial


@click.command("doctor")
@settings_options
@click.option("--kind", help="Set the engine's kind [default: from the settings; vllm if a URL is given].")
@json_option
@click.argument("engine_url", required=False)
def command(config_path: Path | None, data: Path, kind: str | None, as_json: bool, engine_url: str | None) -> int:
    """Check this machine; with ENGINE_URL, run the conformance test against that engine."""
    engine: dict[str, object] = {"kind": kind} if kind else {}
    if engine_url:
        engine = {"urls": [engine_url], "kind": kind or "vllm"}
    settings = load_settings(config_path, engine=engine)
    with Console(stderr=True).status("this machine") as status:
        machine = _check_machine(data)
        status.update("runtimes")
        runtimes = run_async(_check_runtimes(settings, data))
        status.update("harnesses")
        harnesses = _check_harnesses(settings)
        status.update(f"engine {', '.join(settings.engine.urls) or f'of the kind {settings.engine.kind}'}")
        engines = run_async(_probe_engines(settings))
    if as_json:
        document: dict[str, object] = {
            "machine": _to_dicts(machine),
            "harnesses": _to_dicts(harnesses),
            "runtimes": [structs.asdict(row.finding) | {"missing": row.missing} for row in runtimes],
            "engines": {url: _to_dicts(rows) for url, rows in engines.items()},
        }
        click.echo(json.dumps(document))
    else:
        console = Console()
        _print_findings(console, "This machine", machine)
        _print_runtimes(console, runtimes)
        _print_findings(console, "Harnesses", harnesses)
        for url, rows in engines.items():
            _print_findings(console, f"Engine {url} ({settings.engine.kind})", rows)
    return 1 if any(row.ok is False for rows in engines.values() for row in rows) else 0


async def _probe_engines(settings: Settings) -> dict[str, list[Finding]]:
    pool = await EnginePool.from_settings(settings.engine)
    try:
        return {replica.url: await probe_engine(replica.engine) for replica in pool.replicas}
    finally:
        await pool.close()


def _check_machine(data: Path) -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return [
        Finding("Python", sys.version_info >= (3, 11), version, "3.11 or newer is needed"),
        _check_store(data),
        *_check_plugins(),
    ]


def _check_plugins() -> list[Finding]:
    """A finding for each plug-in that could not be loaded."""
    advice = "repair or remove its package; nothing else needs it"
    return [Finding("plug-in", False, problem, advice) for problem in list_problems()]


class _RuntimeFinding(Struct):
    finding: Finding
    missing: list[str]  # isolation and limits that it lacks here


async def _check_runtimes(settings: Settings, data: Path) -> list[_RuntimeFinding]:
    backends = load_all("runtimes")
    allowed = settings.node.runtimes or backends
    logging.getLogger("polar.runtimes").setLevel(logging.ERROR)  # the table shows its warnings
    with tempfile.TemporaryDirectory(dir=data if os.access(data, os.W_OK) else None) as state:
        made: dict[str, RuntimeBackend] = {
            name: backend(Path(state), _UNUSED_GATEWAY_URL) for name, backend in backends.items()
        }
        return [await _check_runtime(name, kind, allowed=name in allowed) for name, kind in made.items()]


async def _check_runtime(name: str, kind: RuntimeBackend, *, allowed: bool) -> _RuntimeFinding:
    try:
        problem = await (run_trial(kind) if allowed else kind.check_availability())
        missing = kind.list_isolation_gaps() if problem is None and allowed else []
    finally:
        await kind.close()
    if problem is not None:
        return _RuntimeFinding(Finding(name, False, "does not work here", problem), missing)
    follows = _RUNTIME_ADVICE.get(name, f'backend = "{name}" in a task')
    if os.geteuid() != 0:
        follows += _ROOTLESS_ADVICE.get(name, "")
        if any(limit in missing for limit in ("memory limit", "process limit", "CPU limit")):
            follows += "; for its limits: systemd-run --user --scope -p Delegate=yes polar ..."
    if not allowed:
        return _RuntimeFinding(Finding(name, False, "works, but is not allowed", "name it in [node] runtimes"), missing)
    return _RuntimeFinding(Finding(name, True, "works", follows), missing)


_UNUSED_GATEWAY_URL = "http://127.0.0.1:1"  # nothing calls it
_RUNTIME_ADVICE = {
    "local": "for code that you trust: no isolation",
    "bubblewrap": "the default: a sandbox over this machine's files, or those of an unpacked image",
}
_ROOTLESS_ADVICE = {
    "bubblewrap": "; without root, in a user namespace: all files inside are one user's",
}


def _check_harnesses(settings: Settings) -> list[Finding]:
    cache = find_cache_folder(settings.node.harness_cache)
    presets: list[Harness] = [preset() for preset in load_all("harnesses").values()]
    return [
        _check_harness(preset, cache) for preset in presets if preset.package is not None
    ]  # else: nothing is missing


def _check_harness(preset: Harness, cache: Path) -> Finding:
    """`polar run` uses the harness in the cache, `polar capture` the one on PATH."""
    versions = list_installations(cache, preset.name)
    for installation in versions:
        if (damage := find_damage(installation)) is not None:
            version = installation.version
            advice = f"polar harness install {preset.name}@{version}"
            return Finding(preset.name, False, f"{version} in {cache} is damaged: {damage}", advice)
    path = next((executable for command in preset.executables if (executable := shutil.which(command))), None)
    locations = ([f"installed: {', '.join(one.version for one in versions)}"] if versions else []) + (
        [path] if path else []
    )
    follows = []
    if versions:
        follows.append(f"polar run TASK --harness {preset.name}")
    else:
        follows.append(f"for polar run: polar harness install {preset.name}")
    if path is not None:
        follows.append(f"polar capture -- {preset.executables[0]} ...")
    return Finding(
        preset.name, bool(locations), "; ".join(locations) or "not installed, not on PATH", "; ".join(follows)
    )


def _check_store(data: Path) -> Finding:
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


def _print_findings(console: Console, title: str, rows: list[Finding]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "check", "seen", "what follows"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(_MARKS[row.ok], row.check, row.seen, row.follows)
    console.print(table)


def _print_runtimes(console: Console, rows: list[_RuntimeFinding]) -> None:
    table = Table(title="Runtimes: where polar run puts agents; one of each was tried", title_justify="left")
    for column in ("", "runtime", "seen", "not isolated or limited", "what follows"):
        table.add_column(column, overflow="fold")
    for row in rows:
        finding = row.finding
        table.add_row(_MARKS[finding.ok], finding.check, finding.seen, "; ".join(row.missing), finding.follows)
    console.print(table)


def _to_dicts(rows: list[Finding]) -> list[dict[str, object]]:
    return [structs.asdict(row) for row in rows]

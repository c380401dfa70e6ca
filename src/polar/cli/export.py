"""polar export: writes sessions in a trainer's format."""

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from polar.cli.common import json_option, load_settings, run_async, settings_options
from polar.config import Settings
from polar.errors import ConfigError
from polar.export.base import Exporter, FolderExporter
from polar.export.pipeline import Builder, ExportTally, Selection, export, select_items
from polar.plugins import list_names, load
from polar.records.result import SuspiciousFilter
from polar.records.spans import ExchangeRole
from polar.store import open_store
from polar.trajectory.checker import SessionChecker

_DEFAULT_BUILDER = "prefix_merging"
_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PROGRESS_DELAY_SECONDS = 2.0
"""Longer exports show their progress."""


@click.command("export")
@settings_options
@click.option(
    "--format",
    "format_name",
    required=True,
    metavar="F",
    help="Write this format: polar, slime, verl, sft, preference, ...",
)
@click.option(
    "--builder", metavar="B", help=f"Build traces by per_request or prefix_merging [default: {_DEFAULT_BUILDER}]."
)
@click.option("--session", "sessions", multiple=True, metavar="ID", help="Export only this session (may be repeated).")
@click.option("--min-reward", type=float, metavar="R", help="Export only sessions with a reward of at least R.")
@click.option(
    "--best", type=click.IntRange(1), metavar="N", help="Export only the N sessions of each task that earned most."
)
@click.option("--unique", is_flag=True, help="Export only one of several sessions with equal content.")
@click.option(
    "--suspicious",
    type=click.Choice(get_args(SuspiciousFilter)),
    default="keep",
    show_default=True,
    help="Keep sessions with proven tampering, export only those, or exclude them.",
)
@click.option(
    "--tokenizer", metavar="DIR", help="Render with the template of the model to be trained (sft-tokens only)."
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(ExchangeRole)),
    help="Train only tokens of this role (may be repeated).",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Export only sessions begun since: 2026-01-31, 2026-01-31T12:00, 90m, 12h, 7d.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to a file or folder [default: stdout].")
@json_option
def command(
    config_path: Path | None,
    data: Path,
    format_name: str,
    builder: str | None,
    sessions: tuple[str, ...],
    min_reward: float | None,
    best: int | None,
    unique: bool,
    suspicious: SuspiciousFilter,
    tokenizer: str | None,
    roles: tuple[ExchangeRole, ...],
    since: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Export sessions in a trainer's format, newest first.

    With --role, tokens of other roles are context and do not train; weights are shares of the remaining tokens.
    Sessions that can't be exported are counted on stderr, with the reason.
    """
    since_seconds = None if since is None else parse_since(since, time.time())
    selection = Selection(sessions, since_seconds, min_reward, frozenset(roles), best, unique, suspicious)
    exporter = _make_exporter(format_name, tokenizer)
    if isinstance(exporter, FolderExporter) and (output is None or output.exists()):
        raise ConfigError(f"{format_name} writes a folder: name one with -o that does not exist yet.")
    build = _load_builder(builder, exporter)
    if exporter.is_binary and output is None and sys.stdout.isatty():
        raise ConfigError(f"{format_name} is binary: name a file with -o.")
    tally = run_async(_export(load_settings(config_path), data, exporter, build, selection, output))
    _report(exporter, tally, output, as_json=as_json)
    if not exporter.rows:
        was_found = tally.left_out or exporter.left_out
        why = "every matching session had to be left out" if was_found else "no session matches the options"
        raise ConfigError(f"Nothing was exported from {data}: {why}.")


def _make_exporter(name: str, tokenizer: str | None) -> Exporter:
    kind = load("exporters", name)
    if tokenizer is None:
        return cast(Exporter, kind())
    if "tokenizer" not in getattr(kind, "option_names", ()):
        raise ConfigError(f"The format {name} has no --tokenizer option; sft-tokens has.")
    return cast(Exporter, kind(tokenizer=tokenizer))


def _load_builder(name: str | None, exporter: Exporter) -> Builder:
    if "tree" in exporter.needs:
        if name not in (None, "prefix_tree"):
            raise ConfigError(f"The format {exporter.name} is a tree: omit --builder {name}.")
        name = _DEFAULT_BUILDER
    elif name == "prefix_tree":
        raise ConfigError(f"prefix_tree builds no traces, and {exporter.name} needs them: use --format tree.")
    name = name or _DEFAULT_BUILDER
    if name not in list_names("builders"):
        raise ConfigError(f"Unknown builder {name!r}. Available: {', '.join(list_names('builders'))}.")
    build: Builder = load("builders", name)
    return build


def parse_since(text: str, now: float) -> float:
    """Unix seconds of a time (local, where it names no zone), or of a duration before now."""
    if duration := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip()):
        return now - float(duration[1]) * _SECONDS_BY_UNIT[duration[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"--since {text!r} is neither a time (2026-01-31, 2026-01-31T12:00) nor a duration (90m, 12h, 7d)."
        ) from error


async def _export(
    settings: Settings, data: Path, exporter: Exporter, build: Builder, selection: Selection, output: Path | None
) -> ExportTally:
    database = data / "polar.db"
    if settings.store.url is None and not database.exists():
        raise ConfigError(f"Nothing has been captured in {data} yet: try `polar capture -- YOUR-AGENT`.")
    store = open_store(settings.store.url or f"sqlite:{database}", settings.store.durability)
    tally = ExportTally()
    try:
        with _open_output(output, exporter) as file:
            progress = asyncio.create_task(_show_progress(tally, file, len(selection.sessions) or None))
            try:
                checker = SessionChecker(settings.verify.share)
                items = select_items(store, selection, exporter.needs, build, tally, checker)
                await export(items, exporter, file.write)
            finally:
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)
    finally:
        await store.close()
    return tally


class _CountingFile:
    """A file that counts the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)


@contextmanager
def _open_output(output: Path | None, exporter: Exporter) -> Iterator[_CountingFile]:
    """Opens the output. A file or folder appears under its name only when it is complete, and only with rows."""
    if output is None:
        try:
            yield _CountingFile(sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # `| head`: click ends the command quietly
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise ConfigError(f"Can't write to stdout: {error.strerror}.") from error
        return
    if output.exists() and not output.is_file():
        # A pipe or a device is written in place.
        try:
            with output.open("wb") as file:
                yield _CountingFile(file)
        except OSError as error:
            raise ConfigError(f"Can't write {output}: {error.strerror}.") from error
        return
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        target = partial / exporter.file_name if isinstance(exporter, FolderExporter) else partial
        if isinstance(exporter, FolderExporter):
            for name, text in {exporter.file_name: "", **exporter.extra_files}.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_text(text, encoding="utf-8")
        with target.open("wb") as file:
            yield _CountingFile(file)
            file.flush()
            os.fsync(file.fileno())
        if exporter.rows:
            partial.replace(output)
    except OSError as error:
        raise ConfigError(f"Can't write {output}: {error.strerror}.") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


async def _show_progress(tally: ExportTally, file: _CountingFile, total: int | None) -> None:
    await asyncio.sleep(_PROGRESS_DELAY_SECONDS)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        while True:
            done = f"{tally.sessions} sessions, {file.size / 1e6:.1f} MB"
            bar.update(task, completed=tally.sessions, description=done)
            await asyncio.sleep(0.2)


def _report(exporter: Exporter, tally: ExportTally, output: Path | None, *, as_json: bool) -> None:
    tokens: int = getattr(exporter, "tokens", tally.trainable_tokens)  # its own count, where it re-tokenizes
    if as_json:
        summary: dict[str, Any] = {
            "format": exporter.name,
            "sessions": tally.sessions,
            "rows": exporter.rows,
            "tokens": tokens,
            "left_out": tally.left_out,
            "without_pictures": tally.without_pictures,
            "other_roles": tally.other_roles,
            "excluded": tally.excluded,
            "unfit": exporter.left_out,
            "output": None if output is None else str(output),
        }
        click.echo(msgspec.json.encode(summary), err=output is None)
        return
    for line in tally.describe():
        click.echo(line, err=True)
    for reason, count in exporter.left_out.items():
        click.echo(f"{exporter.name} can't hold: {reason} x {count}", err=True)
    if "without a reward" in tally.left_out:
        click.echo("Set a session's reward with `polar session end ID --reward R` while the server runs.", err=True)
    if not exporter.rows:
        return
    where = "" if output is None else f" to {output}"
    counted = [_format_count(tally.sessions, "session"), _format_count(exporter.rows, "row")]
    if tokens:  # without token ids there is only text
        counted.append(_format_count(tokens, "trainable token"))
    click.echo(f"Exported {', '.join(counted)}{where}.", err=True)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

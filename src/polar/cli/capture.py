"""polar capture: any agent command, unchanged, against a private gateway."""

import asyncio
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from polar.api.capture import PrivateGateway
from polar.cli.common import (
    describe_default_engine,
    engine_options,
    format_show_command,
    json_option,
    parse_json_object,
    private_settings,
    run_async,
    settings_options,
)
from polar.config import Settings
from polar.errors import ConfigError
from polar.harnesses import filter_environment, find_by_command, load_harness
from polar.harnesses.base import SetupRequest, write_setup
from polar.records.exchange import Exchange
from polar.records.session import Verdict
from polar.records.spans import ExcludedSpan
from polar.trajectory.builders import prefix_merging
from polar.trajectory.session import read_session_paths


@click.command("capture", context_settings={"allow_interspersed_args": False})
@settings_options
@click.option("--harness", help="configure a known harness [default: told by the command]")
@click.option("--model", help="the model name that the harness is told to ask for")
@engine_options
@click.option("--metadata", default="{}", help="a JSON object that is kept with the session")
@click.option("--reward", type=float, help="the session's reward, if the command ends well")
@json_option
@click.argument("argv", nargs=-1, required=True, metavar="-- CMD...")
def command(
    argv: tuple[str, ...],
    config_path: Path | None,
    data: Path,
    harness: str | None,
    model: str | None,
    engine_url: str | None,
    kind: str | None,
    metadata: str,
    reward: float | None,
    as_json: bool,
) -> int:
    """Run CMD with every provider's base URL and key pointing at a private gateway; keep and sum up what it asked."""
    settings = private_settings(config_path, engine_url, kind)
    kept = parse_json_object(metadata, "--metadata")
    return run_async(
        capture(settings, data, list(argv), harness=harness, model=model, as_json=as_json, metadata=kept, reward=reward)
    )


class CaptureSummary(Struct):
    """What was captured. `tokens` are the sampled ones; `traces` what merging by exact prefix gives."""

    session_id: str
    exchanges: int = 0
    traces: int = 0
    tokens: int = 0
    exit_code: int = 0
    prompt_tokens: int = 0
    untrainable: int = 0
    untrained_calls: dict[str, int] = field(default_factory=dict)  # calls without a token that trains, by reason
    excluded: dict[str, int] = field(default_factory=dict)  # sampled tokens that don't train, by reason
    branches: dict[str, int] = field(default_factory=dict)  # by reason


async def capture(
    settings: Settings,
    data: Path,
    argv: list[str],
    *,
    harness: str | None,
    model: str | None,
    as_json: bool,
    folder: Path | None = None,
    metadata: dict[str, Any] | None = None,
    reward: float | None = None,
) -> int:
    """Runs `argv` in `folder` (default: this one) and prints what was captured; its exit status."""
    if shutil.which(argv[0]) is None:
        raise ConfigError(f"There is no command {argv[0]!r}.")
    name = harness or find_by_command(argv)
    preset = load_harness(name) if name else None
    wanted = model or (preset.default_model if preset else "polar")
    kept = {"command": argv, "harness": name, "model": wanted} | (metadata or {})
    async with PrivateGateway(settings, data, kept) as gateway:
        summary = CaptureSummary(gateway.session_id)
        variables = filter_environment(os.environ) | gateway.build_environment(wanted)
        # Some harnesses go by PWD, and it is stale where no shell has started us.
        variables["PWD"] = str(folder) if folder else os.getcwd()
        if preset is not None:
            home = _make_private_home(data, gateway.session_id)
            setup = preset.setup(SetupRequest(str(home), variables["PWD"], gateway.url, gateway.api_key, wanted))
            write_setup(setup, home)
            variables |= {"HOME": str(home)} | setup.env
        try:
            summary.exit_code = await _run_command(argv, variables, folder)
        finally:
            verdict = Verdict(reward) if reward is not None and summary.exit_code == 0 else Verdict()
            await gateway.end(verdict)
        recorded, exchanges = await gateway.read()
    for exchange in exchanges:
        summary.exchanges += 1
        summary.tokens += exchange.usage.completion
        summary.prompt_tokens += exchange.usage.prompt
        summary.untrainable += exchange.untrainable is not None
        if exchange.branch_reason is not None:
            summary.branches[exchange.branch_reason] = summary.branches.get(exchange.branch_reason, 0) + 1
    built = prefix_merging(read_session_paths(recorded, exchanges))
    summary.traces = len(built.traces)
    for excluded in built.excluded:
        count = excluded.stop - excluded.start
        summary.excluded[excluded.reason] = summary.excluded.get(excluded.reason, 0) + count
    summary.untrained_calls = _count_untrained_calls(exchanges, built.excluded)
    if as_json:
        # The command's own output may not have ended its line.
        click.echo("\n" + msgspec.json.encode(summary).decode())
    else:
        _print_summary(summary, settings, data)
    if summary.exit_code == 0 and summary.exchanges == 0:
        raise ConfigError(
            "The command ended well, but asked the gateway nothing: does it read OPENAI_BASE_URL, ANTHROPIC_BASE_URL "
            "or GOOGLE_GEMINI_BASE_URL? A known harness can be named with --harness."
        )
    return summary.exit_code


def _print_summary(summary: CaptureSummary, settings: Settings, data: Path) -> None:
    table = Table(title=f"Captured session {summary.session_id}", title_justify="left")
    columns = {
        "model calls": summary.exchanges,
        "traces": summary.traces,
        "prompt tokens": summary.prompt_tokens,
        "sampled tokens": summary.tokens,
        "untrainable calls": summary.untrainable,
        "exit code": summary.exit_code,
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in columns.values()))
    console = Console(stderr=True)
    console.print(table)
    if summary.traces > 1:
        console.print(
            "A trace is a run of calls whose prompts each begin with everything before, token for token. "
            "A sub-agent begins another, and so does a history that was changed."
        )
    if summary.branches:
        console.print(f"Prompts that don't just go on from recorded tokens: {_format_counts(summary.branches)}.")
    if summary.untrained_calls:
        console.print(f"Calls that don't train: {_format_reasons(summary.untrained_calls)}.")
    if "forced_tool" in summary.untrained_calls:
        console.print(
            "A call whose tool_choice forces a tool does not train: the engine masks tokens that don't fit the call,"
            " so their log-probabilities are not those that were sampled with. Use tool_choice auto where you can."
        )
    if summary.excluded:
        console.print(f"Sampled tokens that don't train: {_format_counts(summary.excluded)}.")
    if (note := describe_default_engine(settings)) is not None:
        console.print(note)
    console.print(f"Look at it with: {format_show_command(summary.session_id, data)}")


def _count_untrained_calls(exchanges: list[Exchange], excluded: list[ExcludedSpan]) -> dict[str, int]:
    """Calls none of whose sampled tokens train, by reason: the call's own, or that of its first excluded tokens."""
    reasons: dict[str, str] = {}
    tokens: Counter[str] = Counter()
    for span in excluded:
        reasons.setdefault(span.exchange_id, span.reason)
        tokens[span.exchange_id] += span.stop - span.start
    counts: Counter[str] = Counter()
    for exchange in exchanges:
        name = exchange.exchange_id
        if exchange.untrainable is not None:
            counts[exchange.untrainable] += 1
        elif name in reasons and exchange.sampled_ids is not None and tokens[name] == len(exchange.sampled_ids):
            counts[reasons[name]] += 1
    return dict(counts)


def _format_reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _make_private_home(data: Path, session_id: str) -> Path:
    home = data.absolute() / "homes" / session_id
    home.mkdir(parents=True)
    return home


async def _run_command(argv: list[str], variables: dict[str, str], folder: Path | None) -> int:
    """The command's exit status. It shares our terminal; an interrupt reaches it first, and we wait for its end."""
    loop = asyncio.get_running_loop()
    try:
        process = await asyncio.create_subprocess_exec(*argv, env=variables, cwd=folder)
    except OSError as error:
        raise ConfigError(f"Can't run {argv[0]!r}: {error.strerror}.") from error
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    try:
        status = await process.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return status if status >= 0 else 128 - status

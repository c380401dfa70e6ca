"""polar show: prints a session's model calls as a readable tree."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from polar.cli import show_tree
from polar.cli.common import config_option, data_option, json_option, load_settings, run_async
from polar.cli.show_tokens import TokenView, decodes_to_replies, escape_controls
from polar.config import Settings
from polar.engines.scripted.server import TOKENIZER_FOLDER as SCRIPTED_TOKENIZER
from polar.errors import ConfigError
from polar.gateway import view
from polar.node.finished_session import SessionFolder
from polar.records.exchange import Exchange
from polar.rendering.tokenizer import Tokenizer
from polar.store import open_store
from polar.store.base import Store
from polar.trajectory import session as sessions
from polar.trajectory.roles import read_call

DEFAULT_CALL_LIMIT = 20


@click.command("show")
@config_option
@data_option
@click.option("--tokens", is_flag=True, help="Show tokens: context dim, sampled coloured, excluded struck out.")
@click.option("--ids", is_flag=True, help="Show tokens with their ids.")
@click.option(
    "--tokenizer",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Decode with the tokenizer in this folder [default: the configured or the scripted engine's].",
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=DEFAULT_CALL_LIMIT,
    show_default=True,
    help="Show at most this many calls of an uneventful stretch; 0 shows all calls and complete contexts.",
)
@json_option
@click.argument("session_id", required=False)
def command(
    session_id: str | None,
    config_path: Path | None,
    data: Path,
    tokens: bool,
    ids: bool,
    folder: Path | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show a session (default: the newest) as a tree of its calls, each below the call that it continues."""
    settings = load_settings(config_path)
    run_async(
        show_session(settings, data, session_id, as_json=as_json, tokens=tokens, ids=ids, folder=folder, limit=limit)
    )


async def show_session(
    settings: Settings,
    data: Path,
    session_id: str | None,
    *,
    as_json: bool = False,
    tokens: bool = False,
    ids: bool = False,
    folder: Path | None = None,
    limit: int = DEFAULT_CALL_LIMIT,
) -> None:
    store = open_existing_store(settings, data)
    try:
        if session_id is None:
            newest = await store.list_sessions(limit=1)
            if not newest:
                raise _make_empty_error(data)
            session_id = newest[0].session_id
        session = await store.find_session(session_id)
        if session is None:
            raise ConfigError(f"There is no session {session_id} in {data}.")
        exchanges = [exchange async for exchange in store.read_exchanges(session_id)]
    finally:
        await store.close()
    if as_json:
        labels = sessions.assign_session_roles(session, [read_call(exchange) for exchange in exchanges])
        rows = [view.exchange_to_dict(exchange, labels[exchange.exchange_id]) for exchange in exchanges]
        document = {"session": view.session_to_dict(session), "exchanges": rows}
        click.echo(view.encode_json(document | read_documents(data, session_id)))
        return
    token_view = None
    if tokens or ids:
        tokenizer = _find_tokenizer(settings, folder, exchanges)
        token_view = TokenView(tokenizer, show_ids=ids, show_all=limit == 0)
        if tokenizer is None:
            click.echo("The tokenizer of these tokens is unknown: name its folder with --tokenizer.", err=True)
    paths = sessions.read_session_paths(session, exchanges).paths
    console = Console()
    console.print(show_tree.render_tree(session, exchanges, paths, token_view, limit))
    for line in describe_folder(data, session_id):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def open_existing_store(settings: Settings, data: Path) -> Store:
    """Opens the store. Raises ConfigError where nothing has been captured yet."""
    database = data / "polar.db"
    if settings.store.url is None and not database.exists():
        raise _make_empty_error(data)
    return open_store(settings.store.url or f"sqlite:{database}", settings.store.durability)


def _make_empty_error(data: Path) -> ConfigError:
    return ConfigError(f"Nothing has been captured in {data} yet: try `polar capture -- YOUR-AGENT`.")


def _find_tokenizer(settings: Settings, folder: Path | None, exchanges: Sequence[Exchange]) -> Tokenizer | None:
    """The named tokenizer; else the configured one, if it decodes the sampled ids to the replies; else None."""
    if folder is not None:
        return Tokenizer.load(folder)
    likely = SCRIPTED_TOKENIZER if settings.engine.tokenizer is None else Path(settings.engine.tokenizer)
    if not (likely / "tokenizer.json").exists():
        return None
    tokenizer = Tokenizer.load(likely)
    return tokenizer if decodes_to_replies(tokenizer, exchanges) else None


# The session's folder on its node, beside the store

_DOCUMENTS = ("verdict", "timing")
_LIMIT_NAMES = {"length": "limit of turns or tokens, or the model's context"}


def read_documents(data: Path, session_id: str) -> dict[str, Any]:
    """The session's verdict and timing, as far as they exist."""
    folder = SessionFolder(data, session_id).path
    documents = {}
    for name in _DOCUMENTS:
        path = folder / f"{name}.json"
        if path.exists():
            documents[name] = msgspec.json.decode(path.read_bytes())
    return documents


def describe_folder(data: Path, session_id: str) -> Iterator[str]:
    documents = read_documents(data, session_id)
    if "verdict" in documents:
        yield from _describe_verdict(documents["verdict"])
    if stages := documents.get("timing", {}).get("seconds"):
        yield f"seconds: {', '.join(f'{stage} {seconds:.2f}' for stage, seconds in stages.items())}"
    folder = SessionFolder(data, session_id).path
    if folder.is_dir():
        kept = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
        yield f"in {folder}: {', '.join(kept)}"


def _describe_verdict(verdict: dict[str, Any]) -> Iterator[str]:
    reward, reason, detail = verdict["reward"], verdict["reason"], verdict["detail"]
    earned = "not evaluated" if reason is None else f"no reward: {reason}"
    if reward is not None:
        earned = f"reward {reward:g}"
    yield f"task {verdict['task_id']}, sample {verdict['sample']}: {earned}"
    if verdict["error"]:
        yield f"  {escape_controls(verdict['error'])}"
    if detail:
        yield f"  {_format_fields(detail)}"
    if (outcome := verdict["outcome"]) is not None:
        code = "was killed" if outcome["exit_code"] is None else f"ended with {outcome['exit_code']}"
        limit = (
            "" if outcome["ended"] == "finished" else f", by its {_LIMIT_NAMES.get(outcome['ended'], outcome['ended'])}"
        )
        memory = ", out of memory" if outcome["out_of_memory"] else ""
        yield f"  the harness {code} after {outcome['seconds']:.2f} s{limit}{memory}"


def _format_fields(detail: dict[str, Any]) -> str:
    return ", ".join(f"{escape_controls(name)}: {_format_value(name, value)}" for name, value in detail.items())


def _format_value(name: str, value: Any) -> str:
    """Formats a value for reading; verdict.json has it in full precision."""
    match value:
        case None:
            return "killed" if name == "exit_code" else "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f} s" if name == "seconds" else f"{value:.4g}"
        case dict():
            return f"({_format_fields(value)})" if value else "none"
        case list():
            return f"[{', '.join(_format_value('', one) for one in value)}]" if value else "none"
    return escape_controls(str(value))

"""polar show: a session's model calls, as a person would like to read them."""

from pathlib import Path

import click
from rich.console import Console
from rich.text import Text as Styled
from rich.tree import Tree

from polar.cli.common import config_option, data_option, json_option, load_settings, run
from polar.config import Settings
from polar.errors import ConfigError
from polar.gateway import view
from polar.plugins import load
from polar.store import open_store
from polar.store.base import Exchange
from polar.types import Message, Reasoning, Text, ToolCall, ToolResult

_STYLES = {"complete": "green", "partial": "yellow", "failed": "red"}
_WIDTH = 160


@click.command("show")
@config_option
@data_option
@json_option
@click.argument("session_id", required=False)
def command(session_id: str | None, config_path: Path | None, data: Path, as_json: bool) -> None:
    """Show a session (default: the newest) as a tree of its calls."""
    run(show(load_settings(config_path), data, session_id, as_json=as_json))


async def show(settings: Settings, data: Path, session_id: str | None, *, as_json: bool = False) -> None:
    database = data / "polar.db"
    if settings.store.url is None and not database.exists():
        raise ConfigError(f"Nothing has been captured in {data} yet: try `polar capture -- YOUR-AGENT`.")
    url = settings.store.url or f"sqlite:{database}"
    store = open_store(url, settings.store.durability)
    try:
        if session_id is None:
            newest = await store.sessions(limit=1)
            if not newest:
                raise ConfigError(f"Nothing has been captured in {data} yet: try `polar capture -- YOUR-AGENT`.")
            session_id = newest[0].session_id
        session = await store.session(session_id)
        if session is None:
            raise ConfigError(f"There is no session {session_id} in {data}.")
        exchanges = [exchange async for exchange in store.exchanges(session_id)]
    finally:
        await store.close()
    if as_json:
        shown = {"session": view.session(session), "exchanges": [view.exchange(exchange) for exchange in exchanges]}
        click.echo(view.encode(shown))
        return
    reward = "" if session.reward is None else f", reward {session.reward:g}"
    root = Tree(f"[bold]{session_id}[/] {session.status}{reward}, {len(exchanges)} model calls")
    branches: dict[str | None, Tree] = {None: root}
    for exchange in exchanges:
        # A call hangs where the conversation it goes on from hangs; only a fork opens a new branch.
        parent = exchange.parent if exchange.parent in branches else None
        siblings = sum(other.parent == exchange.parent for other in exchanges)
        place = branches[parent]
        node = place.add(_headline(exchange))
        for line in _lines(exchange):
            node.add(line)
        branches[exchange.exchange_id] = node if siblings > 1 else place
    Console().print(root)


def _headline(exchange: Exchange) -> Styled:
    sampled = 0 if exchange.sampled_ids is None else len(exchange.sampled_ids)
    prompt = 0 if exchange.prompt_ids is None else len(exchange.prompt_ids)
    line = Styled(f"#{exchange.seq} ", style="bold")
    line.append(exchange.status, _STYLES[exchange.status])
    line.append(f" {exchange.role} {exchange.dialect}: {prompt} tokens in, {sampled} sampled")
    if exchange.versions:
        versions = sorted({span.version for span in exchange.versions})
        line.append(f", policy {'-'.join(str(version) for version in versions)}")
    if exchange.finish_reason:
        line.append(f", {exchange.finish_reason}")
    if exchange.untrainable:
        line.append(f", untrainable: {exchange.untrainable}", "yellow")
    return line


def _lines(exchange: Exchange) -> list[Styled]:
    lines = []
    dialect = load("dialects", exchange.dialect)()
    request = dialect.decode_request(exchange.wire, dict(exchange.params))
    for message in _news(request.messages):
        lines += [_line(message.role, part.text, "dim") for part in message.parts if isinstance(part, Text)]
        for part in message.parts:
            if isinstance(part, ToolResult):
                said = "".join(piece.text for piece in part.parts if isinstance(piece, Text))
                lines.append(_line("result", said, "dim"))
    for part in exchange.reply.parts if exchange.reply else ():
        match part:
            case Reasoning():
                lines.append(_line("thinks", part.text, "italic magenta"))
            case Text():
                lines.append(_line("says", part.text, "cyan"))
            case ToolCall():
                lines.append(_line("calls", f"{part.name} {part.arguments}", "green"))
    if exchange.error:
        lines.append(_line("error", exchange.error, "red"))
    return lines


def _news(messages: list[Message]) -> list[Message]:
    """What came since the model spoke last."""
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return messages[last + 1 :]


def _line(who: str, text: str, style: str) -> Styled:
    flat = " ".join(text.split())
    return Styled(f"{who}: ", style="bold").append(flat if len(flat) <= _WIDTH else flat[: _WIDTH - 1] + "…", style)

"""polar show: prints a session's model calls as a readable tree."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text as Styled
from rich.tree import Tree

from polar.cli.common import config_option, data_option, json_option, load_settings, run_async
from polar.cli.show_tokens import TokenView, decodes_to_replies, escape_controls
from polar.config import Settings
from polar.engines.scripted.server import TOKENIZER_FOLDER as SCRIPTED_TOKENIZER
from polar.errors import ApiError, ConfigError
from polar.gateway import view
from polar.node.finished_session import SessionFolder
from polar.plugins import load
from polar.records.exchange import Exchange
from polar.records.session import Evidence, Session
from polar.records.trajectory import TokenPath
from polar.rendering.tokenizer import Tokenizer
from polar.store import open_store
from polar.store.base import Store
from polar.trajectory import session as sessions
from polar.trajectory.roles import read_call
from polar.types import Message, Part, Reasoning, Text, ToolCall, ToolResult

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
    console.print(render_tree(session, exchanges, paths, token_view, limit))
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


# The tree: a call hangs under the one that it continues. Drawn like that alone, a conversation of 200 turns would be
# 200 levels deep, so a conversation runs straight down one level; where it forks, the branch with the most calls runs
# on, and the others hang below the call that they leave. In a long run, calls in which nothing happens are one line.

_STATUS_STYLES = {"complete": "green", "partial": "yellow", "failed": "red", "interrupted": "red"}
_MAX_LINE_CHARS = 160


class _CallNode(Struct):
    exchange: Exchange
    path: TokenPath | None  # None where nothing was sampled
    parent: Exchange | None
    turn_reward: float | None
    next_call: "_CallNode | None" = None
    branches: list["_CallNode"] = []
    subtree_size: int = 1  # of its subtree, in calls

    @property
    def has_incident(self) -> bool:
        """Something that a person would want to see."""
        exchange = self.exchange
        return bool(
            self.branches
            or exchange.error
            or exchange.malformed
            or exchange.status != "complete"
            or self.turn_reward is not None
        )

    @property
    def similarity_key(self) -> tuple[object, ...]:
        """Equal for calls that are like each other; where it changes, one wants to see it."""
        exchange, path = self.exchange, self.path
        role = None if path is None else (path.role, path.agent_id)
        versions = {span.version for span in exchange.versions}
        return exchange.continuation, exchange.branch_reason, exchange.untrainable, role, versions


def render_tree(
    session: Session,
    exchanges: Sequence[Exchange],
    paths: Sequence[TokenPath],
    tokens: TokenView | None = None,
    limit: int = 0,
) -> Tree:
    """`limit`: how many calls of a run are shown at least, if there are more and nothing happens in them; 0: all."""
    roots = _build_forest(session, exchanges, {path.exchange_id: path for path in paths})
    root = Tree(_format_session(session, exchanges, paths))
    for first in roots:
        _add_run(root, first, tokens, limit, nested=len(roots) > 1)
    return root


def _add_run(parent: Tree, first: _CallNode, tokens: TokenView | None, limit: int, *, nested: bool) -> None:
    """A run of calls below `place`; a nested one below its own first call. At a fork the larger half runs on, so this
    goes no deeper than the logarithm of the calls."""
    for call in _collapse_run(first, limit):
        if isinstance(call, Styled):
            parent.add(call)
            continue
        node = parent.add(_format_call(call))
        for line in _format_call_details(call, tokens):
            node.add(line)
        for branch in call.branches:
            _add_run(node, branch, tokens, limit, nested=True)
        if nested and call is first:
            parent = node


def _build_forest(session: Session, exchanges: Sequence[Exchange], paths: Mapping[str, TokenPath]) -> list[_CallNode]:
    """The calls that go on from none; below them, each call knows which ones go on from it."""
    calls: dict[str, _CallNode] = {}
    roots: list[_CallNode] = []
    for exchange in exchanges:
        above = calls.get(exchange.parent or "")  # one that comes later, or is not there, is none
        reward = session.turn_rewards.get(exchange.exchange_id)
        call = _CallNode(
            exchange, paths.get(exchange.exchange_id), above.exchange if above else None, reward, branches=[]
        )
        calls[exchange.exchange_id] = call
        (above.branches if above else roots).append(call)
    for call in reversed(calls.values()):  # those below come before those above
        call.subtree_size += sum(below.subtree_size for below in call.branches)
        if call.branches:
            call.next_call = max(call.branches, key=lambda below: (below.subtree_size, below.exchange.seq))
            call.branches.remove(call.next_call)
    return roots


def _collapse_run(first: _CallNode, limit: int) -> Iterator[_CallNode | Styled]:
    run = [first]
    while (following := run[-1].next_call) is not None:
        run.append(following)
    edge = limit // 2
    hidden: list[_CallNode] = []
    for number, call in enumerate(run):
        inner = limit and edge <= number < len(run) - edge
        if inner and not call.has_incident and call.similarity_key == run[number - 1].similarity_key:
            hidden.append(call)
            continue
        yield from _collapse_hidden(hidden)
        hidden = []
        yield call
    yield from _collapse_hidden(hidden)


def _collapse_hidden(hidden: list[_CallNode]) -> Iterator[_CallNode | Styled]:
    if len(hidden) < 3:
        yield from hidden
        return
    first, last = hidden[0].exchange, hidden[-1].exchange
    sampled = sum(0 if call.exchange.sampled_ids is None else len(call.exchange.sampled_ids) for call in hidden)
    summary = f"… {len(hidden)} calls like these, #{first.seq} to #{last.seq}: {sampled} sampled (--limit 0 shows them)"
    yield Styled(summary, "dim italic")


def _format_session(session: Session, exchanges: Sequence[Exchange], paths: Sequence[TokenPath]) -> Styled:
    line = Styled(session.session_id, "bold").append(f" {session.status}", "not bold")
    if session.reward is not None:
        line.append(f", reward {session.reward:g}", "not bold green")
    elif session.reason is not None:
        line.append(f", no reward: {escape_controls(session.reason)}", "not bold yellow")
    line.append(f", {len(exchanges)} model call{'s' * (len(exchanges) != 1)}", "not bold")
    roles: Counter[str] = Counter(path.role for path in paths)
    excluded: Counter[str] = Counter()
    for path in paths:
        for span in path.excluded:
            excluded[span.reason] += span.stop - span.start
    branches = Counter(exchange.branch_reason for exchange in exchanges if exchange.branch_reason)
    sampled, trainable = sum(len(path.sampled) for path in paths), sum(path.num_trainable for path in paths)
    facts = [_format_counts(roles), f"{sampled} tokens sampled, {trainable} of them train"]
    if excluded:
        facts.append(f"excluded: {_format_counts(excluded)}")
    if branches:
        facts.append(f"branches: {_format_counts(branches)}")
    line.append("\n" + "; ".join(fact for fact in facts if fact), "not bold dim")
    for evidence in session.evidence:
        line.append(f"\n{_describe_evidence(evidence)}", "not bold red" if evidence.proven else "not bold yellow")
    return line


def _describe_evidence(evidence: Evidence) -> str:
    proof = "proven tampering" if evidence.proven else "unproven sign of tampering"
    times = f" x {evidence.count}" if evidence.count > 1 else ""
    detail = f" ({escape_controls(evidence.detail)})" if evidence.detail else ""
    return f"{proof}: {evidence.kind} {escape_controls(evidence.subject)}{times}{detail}"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    )


def _format_call(call: _CallNode) -> Styled:
    exchange, path = call.exchange, call.path
    sampled = 0 if exchange.sampled_ids is None else len(exchange.sampled_ids)
    prompt = 0 if exchange.prompt_ids is None else len(exchange.prompt_ids)
    line = Styled(f"#{exchange.seq} ", style="bold")
    line.append(exchange.status, _STATUS_STYLES[exchange.status])
    if path is not None:
        line.append(f" {_describe_role(path)}", "not bold blue")
    line.append(f" {exchange.dialect}: {prompt} tokens in ({exchange.continuation}), {sampled} sampled", "not bold")
    if exchange.versions:
        versions = sorted({span.version for span in exchange.versions})
        line.append(f", policy {'-'.join(str(version) for version in versions)}", "not bold")
    if exchange.finish_reason:
        line.append(f", {exchange.finish_reason}", "not bold")
    if call.turn_reward is not None:
        line.append(f", reward {call.turn_reward:g}", "not bold green")
    if exchange.branch_reason:
        line.append(f", branch: {exchange.branch_reason}", "not bold magenta")
    if exchange.untrainable:
        line.append(f", untrainable: {exchange.untrainable}", "not bold yellow")
    for excluded in () if path is None else path.excluded:
        if excluded.reason != exchange.untrainable:
            line.append(f", {excluded.stop - excluded.start} excluded: {excluded.reason}", "not bold yellow")
    if exchange.malformed:
        line.append(", malformed call", "not bold yellow")
    return line


def _describe_role(path: TokenPath) -> str:
    """The role, and whose it is: `main`, `subagent agent-1`, `auxiliary of main`."""
    if path.agent_id in (None, path.role):
        return path.role
    return f"{path.role} {path.agent_id}" if path.role == "subagent" else f"{path.role} of {path.agent_id}"


def _format_call_details(call: _CallNode, tokens: TokenView | None) -> Iterator[Styled]:
    exchange = call.exchange
    for message in _list_new_messages(exchange):
        for part in message.parts:
            if isinstance(part, Text):
                yield _format_text(message.role, part.text, "dim")
            elif isinstance(part, ToolResult):
                text = "".join(piece.text for piece in part.parts if isinstance(piece, Text))
                yield _format_text("result", text, "dim")
    for part in exchange.reply.parts if exchange.reply else ():
        if (line := _format_part(part)) is not None:
            yield line
    if exchange.error:
        yield _format_text("error", exchange.error, "red")
    if tokens is not None:
        yield from tokens.render_lines(exchange, call.path, call.parent)


def _format_part(part: Part) -> Styled | None:
    match part:
        case Reasoning():
            return _format_text("thinks", part.text, "italic magenta")
        case Text():
            return _format_text("says", part.text, "cyan")
        case ToolCall():
            return _format_text("calls", f"{part.name} {part.arguments}", "green")
    return None


def _list_new_messages(exchange: Exchange) -> list[Message]:
    """What came since the model spoke last; nothing where the request was refused, and so has no meaning."""
    dialect = load("dialects", exchange.dialect)()
    try:
        messages: list[Message] = dialect.decode_request(exchange.raw_request, dict(exchange.params)).messages
    except ApiError:
        return []
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return messages[last + 1 :]


def _format_text(label: str, text: str, style: str) -> Styled:
    flat = escape_controls(" ".join(text.split()))
    shown = flat if len(flat) <= _MAX_LINE_CHARS else flat[: _MAX_LINE_CHARS - 1] + "…"
    return Styled(f"{label}: ", style="bold").append(shown, f"not bold {style}")

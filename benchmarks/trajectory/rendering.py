"""What a turn costs at 30,000 tokens of context: rendered and encoded by difference, against whole.

    by difference   what the gateway does with a call: a plan (recorded ids + text), and the ids of that text
    whole           the template over all messages, and the tokenizer over all text; nothing is remembered

A conversation of a coding agent grows turn by turn up to there, so that by then everything but the last turn is known,
as in a session. Each turn within 5,000 tokens of there is measured once in both ways (CPU time of the calling thread).

`added` is the gateway's whole share in such a call, over HTTP and with capture: how much longer it takes than the same
ids sent straight to the engine. Everything runs in one process there, so its parts never work at the same time.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Raw, Struct

from benchmarks.calls import make_filler
from benchmarks.client import BenchmarkError, Connection, encode_post, get_port
from polar import ids
from polar.config import Settings
from polar.dialects.base import Dialect
from polar.engines.scripted import Play, ScriptedServer
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.gateway.data_plane import DataPlane
from polar.plugins import load
from polar.records.exchange import Exchange
from polar.rendering.continuation import RecordedTurn, TurnHistory
from polar.rendering.model_codec import ModelCodec
from polar.rendering.turn_digest import digest_turn
from polar.types import Message, Part, Reasoning, Request, Text, Tool, ToolCall, ToolResult

OWN = "the scripted engine's"
CONTEXT = 30_000
WINDOW = 5_000
_SAMPLED = 150  # tokens of a turn in the rendered conversation, where nothing is sampled
_SYSTEM_CHARACTERS, _TOOL_CHARACTERS, _RESULT_CHARACTERS = 18_000, 1_300, 1_600
_TURNS_AT_MOST = 400


class RenderingCost(Struct):
    """Milliseconds for a turn, medians over `turns`."""

    tokenizer: str
    context: int  # tokens
    messages: int
    turns: int
    incremental: float
    whole: float
    added_first: float  # to the first byte of a streamed reply
    added: float  # to its last

    @property
    def ratio(self) -> float:
        return self.whole / self.incremental


async def measure(tokenizer: str | None, context: int = CONTEXT, window: int = WINDOW) -> RenderingCost:
    """The turns whose prompts have `context` tokens, give or take `window`."""
    folder = tokenizer or str(TOKENIZER_FOLDER)
    near = range(context - window, context + window)
    messages, incremental, whole = await asyncio.to_thread(_measure_rendering, folder, near)
    added_first, added = await _measure_gateway_share(folder, near)
    name = Path(tokenizer).name if tokenizer else OWN
    milliseconds = (median(it) * 1e3 for it in (incremental, whole, added_first, added))
    return RenderingCost(name, context, messages, len(whole), *milliseconds)


# The conversation


class _Talk:
    """It begins like codex's, with 9,000 tokens of system prompt and tools (pi: 1,500, claude-code: 19,000); each turn
    thinks, says something and runs a command."""

    def __init__(self) -> None:
        schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        names = ["bash", *(f"tool_{number}" for number in range(1, 12))]
        self.tools = [
            Tool(name, make_filler(name, _TOOL_CHARACTERS), Raw(msgspec.json.encode(schema))) for name in names
        ]
        self.messages = [
            Message("system", [Text(make_filler("system", _SYSTEM_CHARACTERS))]),
            Message("user", [Text("Make the failing tests pass.")]),
        ]

    def request(self) -> Request:
        return Request("scripted", list(self.messages), self.tools, stream=True)

    def go_on(self, reply: list[Part]) -> None:
        self.messages.append(Message("assistant", reply))
        calls = [part for part in reply if isinstance(part, ToolCall)]
        result = Text(make_filler(f"result {len(self.messages)}", _RESULT_CHARACTERS))
        self.messages += [Message("tool", [ToolResult(call.id, [result])]) for call in calls]


# Rendering alone


def _measure_rendering(folder: str, near: range) -> tuple[int, list[float], list[float]]:
    """The messages there, and seconds for each turn."""
    model, history, talk = ModelCodec.load(folder), TurnHistory(), _Talk()
    incremental: list[float] = []
    whole: list[float] = []
    last: RecordedTurn | None = None
    for seq in range(_TURNS_AT_MOST):
        request = talk.request()
        started_at = time.thread_time()
        plan = model.plan_prompt(request, history, lambda _known, _shown: None)
        new = model.encoder.encode(plan.text, first=plan.base is None)
        took = time.thread_time() - started_at
        if last is not None and (plan.base is None or plan.base.turn is not last or plan.base.sampled_tokens is None):
            raise BenchmarkError(f"The template does not let turn {seq} go on from the one before: {plan.reason}.")
        prompt = len(new) + (0 if last is None else last.prompt_tokens + last.sampled_tokens)
        if prompt >= near.stop:
            return len(talk.messages) - len(whole), incremental, whole  # two messages a turn: so many in the middle
        if prompt in near:
            incremental.append(took)
            whole.append(_time_full_rendering(model, request))
        if plan.mark is None:
            raise BenchmarkError("The template's prompts can't be continued.")
        exchange_id = ids.new_exchange_id()
        reply = _make_reply(exchange_id, seq)
        last = RecordedTurn(exchange_id, seq, plan.mark, digest_turn(reply), prompt, _SAMPLED, _SAMPLED)
        history.add(last)
        talk.go_on(reply)
    raise BenchmarkError(f"The conversation did not reach {near.stop} tokens.")


def _make_reply(exchange_id: str, seq: int) -> list[Part]:
    arguments = msgspec.json.encode({"command": f"grep -rn 'def handle_{seq}' src/"}).decode()
    call = ToolCall(ids.make_call_id(exchange_id, 0), "bash", arguments)
    return [Reasoning(make_filler(f"thought {seq}", 240)), Text(make_filler(f"said {seq}", 160)), call]


def _time_full_rendering(model: ModelCodec, request: Request) -> float:
    messages = [_encode_chat_message(message) for message in request.messages]
    tools = [
        {
            "type": "function",
            "function": {"name": it.name, "description": it.description, "parameters": _decode_schema(it)},
        }
        for it in request.tools
    ]
    started_at = time.thread_time()
    model.tokenizer.encode(model.tokenizer.template.render(messages, tools))
    return time.thread_time() - started_at


def _decode_schema(tool: Tool) -> Any:
    return msgspec.json.decode(bytes(tool.parameters or b"{}"))


def _encode_chat_message(message: Message) -> dict[str, Any]:
    """As a chat API has it, which is what templates are written for."""
    plain: dict[str, Any] = {"role": message.role, "content": ""}
    for part in message.parts:
        match part:
            case Text():
                plain["content"] = part.text
            case Reasoning():
                plain["reasoning_content"] = part.text
            case ToolCall():
                function = {"name": part.name, "arguments": part.arguments}
                plain["tool_calls"] = [{"id": part.id, "type": "function", "function": function}]
            case ToolResult():
                plain["tool_call_id"] = part.call_id
                plain["content"] = "".join(piece.text for piece in part.parts if isinstance(piece, Text))
    return plain


# The gateway's share


async def _measure_gateway_share(folder: str, near: range) -> tuple[list[float], list[float]]:
    """Seconds added to the first and to the last byte of each streamed reply."""
    first: list[float] = []
    last: list[float] = []
    dialect: Dialect = load("dialects", "openai_chat")()
    play = Play.random(0, _TURNS_AT_MOST, 30)
    engine = {"kind": "scripted", "tokenizer": folder}
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as data:
        async with ScriptedServer(play, tokenizer=folder) as server:
            settings = Settings.model_validate({"engine": engine | {"urls": [server.url]}, "gateway": {"port": 0}})
            async with DataPlane(settings, Path(data)) as service:
                session, key = await service.sessions.create({})
                gateway = await Connection.open(get_port(service.gateway_url))
                direct = await Connection.open(get_port(server.url))
                talk = _Talk()
                for seq in range(_TURNS_AT_MOST):
                    body = dialect.encode_request(talk.request())
                    through = await gateway.call(encode_post("/v1/chat/completions", body, key))
                    exchange = await _read_exchange(service, session.session_id, seq)
                    assert exchange.prompt_ids is not None
                    assert exchange.reply is not None
                    if seq and exchange.continuation != "recorded":
                        raise BenchmarkError(f"Turn {seq} did not go on from recorded ids: {exchange.branch_reason}.")
                    if len(exchange.prompt_ids) >= near.stop:
                        break
                    if len(exchange.prompt_ids) in near:
                        straight = await direct.call(encode_post("/inference/v1/generate", _encode_generate(exchange)))
                        first.append((through.first_at - through.sent_at) - (straight.first_at - straight.sent_at))
                        last.append((through.ended_at - through.sent_at) - (straight.ended_at - straight.sent_at))
                    talk.go_on(exchange.reply.parts)
                gateway.close()
                direct.close()
    return first, last


async def _read_exchange(service: DataPlane, session_id: str, seq: int) -> Exchange:
    return [exchange async for exchange in service.store.read_exchanges(session_id)][seq]


def _encode_generate(exchange: Exchange) -> bytes:
    assert exchange.prompt_ids is not None
    sampling = {"max_tokens": 4096, "logprobs": 1}
    return msgspec.json.encode(
        {"model": "scripted", "sampling_params": sampling, "stream": True, "token_ids": exchange.prompt_ids.tolist()}
    )

"""The model calls that are measured: requests of a coding agent's session, as its harness would send them.

A session is a conversation with tools that grows by one assistant turn and one tool result from call to call. Its
text is code-like filler; every message but the system prompt is of its own session (it holds the session's nonce),
as in real runs, where samples of one task share little more than their beginning.

A request is made from a template that is cut at the nonces, so that making one costs the load generator a `join`.
"""

import random
from functools import cache

import numpy as np
from msgspec import Raw, Struct, json

from polar.dialects.base import Dialect
from polar.plugins import load
from polar.records.exchange import Exchange, TokenIds, VersionSpan
from polar.types import Message, Part, Reply, Request, SamplingParams, Text, Tool, ToolCall, ToolResult

TURNS = 10
"""Calls of one session."""

NONCE = "~session-nonce~~"
MARK = "@"
"""Stands nowhere in a request but around marks, which tell the engine what to answer; the last one counts."""

DIALECTS = ("openai_chat", "openai_responses", "anthropic", "google")


class CallSize(Struct, frozen=True):
    """How large the calls of a session are; prompt and request in the mean of its turns."""

    name: str  # one letter, which the marks carry
    request_bytes: int
    prompt_tokens: int
    sampled_tokens: int
    earlier_turns: int  # pairs of assistant turn and tool result before the first call
    system_bytes: int
    tools: int


S = CallSize("S", 59_000, 15_000, 300, earlier_turns=15, system_bytes=8_000, tools=12)
L = CallSize("L", 198_000, 50_000, 2_000, earlier_turns=40, system_bytes=20_000, tools=30)
SMALL = CallSize("T", 4_000, 1_000, 30, earlier_turns=1, system_bytes=1_000, tools=1)
SIZES = {size.name: size for size in (S, L, SMALL)}


class Template(Struct, frozen=True):
    """A request without its nonces."""

    path: str
    pieces: list[bytes]

    def body(self, nonce: bytes) -> bytes:
        return nonce.join(self.pieces)


def make_nonce(number: int) -> bytes:
    return b"%0*d" % (len(NONCE), number)


def make_mark(size: CallSize, turn: int) -> str:
    return f"{MARK}{size.name}{turn:02d}{MARK}"


def find_mark(body: bytes) -> tuple[str, int] | None:
    """The size's letter and the turn that the last mark of a request names."""
    end = body.rfind(MARK.encode())
    found = body[end - 3 : end]
    return (chr(found[0]), int(found[1:])) if end >= 4 and len(found) == 3 else None


@cache
def make_template(
    size: CallSize, turn: int, dialect: str = "openai_chat", *, stream: bool = False, extra: str = ""
) -> Template:
    """Call number `turn` of a session. `extra` is JSON members to add, for peers that are to ask for ids themselves."""
    spoken: Dialect = load("dialects", dialect)()
    body = spoken.encode_request(make_request(size, turn, stream=stream))
    if extra:
        body = body[:-1] + b"," + extra.encode() + b"}"
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    paths = {
        "openai_chat": "/v1/chat/completions",
        "openai_responses": "/v1/responses",
        "anthropic": "/v1/messages",
        "google": f"/v1beta/models/bench:{verb}",
    }
    return Template(paths[dialect], body.split(NONCE.encode()))


def make_request(size: CallSize, turn: int, *, stream: bool = False) -> Request:
    """The canonical form of call number `turn`."""
    messages = [Message("system", [Text(make_filler(f"{size.name} system", size.system_bytes))])]
    messages.append(Message("user", [Text(f"Task {NONCE}: make the failing tests pass. {make_mark(size, 0)}")]))
    for index in range(size.earlier_turns + turn):
        number = index - size.earlier_turns  # negative for what was said before the first call
        call_id = f"call_{index}"
        arguments = json.encode({"command": f"grep -rn 'def handle_{index}' src/", "timeout": 30}).decode()
        said = f"{NONCE} {make_reply_text(size, max(number, 0))}" if number >= 0 else _make_earlier_text(size, index)
        parts: list[Part] = [Text(said), ToolCall(call_id, "bash", arguments)]
        messages.append(Message("assistant", parts))
        filler = make_filler(f"{size.name} result {index}", _compute_result_bytes(size))
        seen = f"{NONCE}\n{filler}\n{make_mark(size, max(number + 1, 0))}"
        messages.append(Message("tool", [ToolResult(call_id, [Text(seen)])]))
    return Request(
        "bench",
        messages,
        tools=_make_tools(size),
        stream=stream,
        sampling=SamplingParams(temperature=1.0, max_tokens=4096),
    )


@cache
def make_reply_text(size: CallSize, turn: int) -> str:
    """What the model says in answer to call number `turn`, about four characters a token."""
    return make_filler(f"{size.name} reply {turn}", size.sampled_tokens * 4 - 120)


@cache
def _make_earlier_text(size: CallSize, index: int) -> str:
    return f"{NONCE} {make_filler(f'{size.name} earlier {index}', 300)}"


@cache
def _compute_result_bytes(size: CallSize) -> int:
    """So that a request has its size in the mean."""
    results = size.earlier_turns + (TURNS - 1) / 2
    replies = (TURNS - 1) / 2 * (size.sampled_tokens * 4 - 120)
    rest = size.request_bytes - size.system_bytes - size.tools * 1_000 - replies - size.earlier_turns * 300
    return max(20, int(rest / results) - 350)


@cache
def _make_tools(size: CallSize) -> list[Tool]:
    bash = Tool("bash", "Run a shell command and return what it printed.", _make_schema("bash"))
    others = [Tool(f"tool_{n}", make_filler(f"tool {n}", 560), _make_schema(f"tool_{n}")) for n in range(1, size.tools)]
    return [bash, *others]


def _make_schema(name: str) -> Raw:
    properties = {
        "command": {"type": "string", "description": f"What {name} is to do, as one line of text."},
        "timeout": {"type": "integer", "description": "Seconds until it is stopped.", "minimum": 1, "maximum": 600},
        "options": {"type": "array", "items": {"type": "string", "enum": ["quiet", "verbose", "force"]}},
    }
    return Raw(json.encode({"type": "object", "properties": properties, "required": ["command"]}))


_VOCABULARY_SIZE = 150_000  # of the tokenizer, where ids are drawn
_VOCABULARY = """self value return index request error for in range result handle session token stream parse None True
import from yield await class def test assert path lines buffer state event config update with open the of a is not"""
_WORDS = _VOCABULARY.split()


@cache
def make_filler(seed: str, size: int) -> str:
    """About `size` characters that look like code: short words, quotes, line ends and indentation."""
    rng = random.Random(seed)
    lines: list[str] = []
    length = 0
    while length < size:
        words = rng.choices(_WORDS, k=rng.randint(3, 9))
        if rng.random() < 0.3:
            words.append(f'"{rng.choice(_WORDS)}_{rng.randrange(100)}"')
        line = " " * 4 * rng.randrange(4) + " ".join(words)
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines)[:size]


# The same calls, as the store has them


def make_conversation(turns: int) -> tuple[list[Exchange], list[int]]:
    """A coding agent's session, call by call, and the bytes of each call as it went over the wire."""
    rng = np.random.default_rng(0)
    dialect: Dialect = load("dialects", "openai_chat")()
    context = draw_ids(rng, S.prompt_tokens // 2)
    exchanges, wholes = [], []
    for seq in range(turns):
        sampled = draw_ids(rng, S.sampled_tokens)
        text = make_reply_text(S, seq)
        body = make_template(S, seq).body(make_nonce(1))
        exchange = Exchange(
            exchange_id=f"x{seq}",
            session_id="bench",
            seq=seq,
            dialect="openai_chat",
            params={},
            hints={},
            raw_request=dialect.split(body),
            status="complete",
            started_at=float(seq),
            ended_at=seq + 0.5,
            reply=Reply(f"x{seq}", "bench", 0, [Text(text)]),
            prompt_ids=context,
            sampled_ids=sampled,
            logprobs=rng.random(len(sampled), np.float32) - 1,
            logprob_kind="raw",
            delivered=len(sampled),
            sampling=SamplingParams(temperature=1.0),
            versions=[VersionSpan(0, 0, len(sampled))],
            finish_reason="stop",
        )
        exchanges.append(exchange)
        wholes.append(len(body) + len(text) + 4 * count_tokens(exchange) + 4 * len(sampled))
        context = np.concatenate([context, sampled, draw_ids(rng, 700)])
    return exchanges, wholes


def count_tokens(exchange: Exchange) -> int:
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    return len(exchange.prompt_ids) + len(exchange.sampled_ids)


def draw_ids(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, _VOCABULARY_SIZE, count, dtype=np.int32)

"""Exchanges to store, made from a seed, and what "read back exactly" means."""

import random
from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec import Raw

from polar.records.exchange import Exchange, RawRequest, TokenIds, VersionSpan
from polar.records.session import Session
from polar.types import Reasoning, Reply, SamplingParams, Text, TokenLogprob, ToolCall, Usage


def session(session_id: str, **changes: object) -> Session:
    known = Session(session_id, f"hash of the key of {session_id}".encode(), 1_700_000_000.0, metadata={"task": [1]})
    return msgspec.structs.replace(known, **changes)


def exchange(session_id: str, seq: int, items: list[bytes], **changes: object) -> Exchange:
    """With every field set, so that one which isn't stored shows."""
    name = f"x-{session_id}-{seq}"
    reply = Reply(
        name,
        "model",
        1_700_000_001,
        [Reasoning("hm", "seal"), Text("Ünï\u0000 \U0001f600"), ToolCall("c1", "bash", '{"a": 1}', namespace="ns")],
        "tool_calls",
        usage=Usage(10, 3, 2, 1),
        logprobs=[TokenLogprob("a", float("nan"), [97], [TokenLogprob("b", float("-inf"))])],
    )
    known = Exchange(
        exchange_id=name,
        session_id=session_id,
        seq=seq,
        dialect="openai_chat",
        params={"model": "m"},
        hints={"user-agent": "codex/1.0"},
        raw_request=wire(items),
        status="complete",
        started_at=1.25,
        ended_at=2.5,
        first_token_at=1.5,
        reply=reply,
        error="a word\u0000 of it",
        prompt_ids=np.arange(10, dtype=np.int32),
        sampled_ids=np.array([7, 8, 9], np.int32),
        logprobs=np.array([-0.1, np.nan, -np.inf], np.float32),
        logprob_kind="processed",
        delivered=2,
        sampling=SamplingParams(temperature=0.7, stop=["END"], logit_bias={"5": -1.5}),
        versions=[VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)],
        replica="http://engine:8000",
        finish_reason="tool_calls",
        usage=Usage(10, 3, 2, 1),
        continuation="recorded",
        branch_reason="edited",
        untrainable="nan_logprobs",
        routed_experts=b"\x00\x01",
    )
    return msgspec.structs.replace(known, **changes)


def wire(items: list[bytes], **fields: bytes) -> RawRequest:
    known = {"model": b'"m"', "tools": b'[ "' + b"t" * 5000 + b'" ]', "stream": b"true"} | fields
    return RawRequest({name: Raw(value) for name, value in known.items()}, "messages", [Raw(item) for item in items])


def conversation(session_id: str, turns: int, *, seed: int = 0, shared_seed: int = 0) -> Iterator[Exchange]:
    """A conversation that grows as they do: 30 KB of tools, a system prompt of 10 KB, two items of about 1.5 KB a turn,
    300 sampled tokens and 200 of context. Sessions of equal `shared_seed` have tools and system prompt in common."""
    common, own = random.Random(f"{shared_seed}"), random.Random(f"{seed}/{session_id}")
    tools = b'[{"description":"' + common.randbytes(15_000).hex().encode() + b'"}]'
    items = [_item(common, 10_000), _item(own, 800)]
    context = _ids(common, 6_000)
    for seq in range(turns):
        sampled = _ids(own, 300)
        yield exchange(
            session_id,
            seq,
            [bytes(item) for item in items],
            raw_request=wire(items, tools=tools),
            prompt_ids=context.copy(),
            sampled_ids=sampled,
            logprobs=np.array([-own.random() for _ in range(300)], np.float32),
            delivered=300,
        )
        items += [_item(own, 1_500), _item(own, 1_500)]
        context = np.concatenate((context, sampled, _ids(own, 200)))


def _item(source: random.Random, size: int) -> bytes:
    return b'{"role": "user", "content": "' + source.randbytes(size // 2).hex().encode() + b'"}'


def _ids(source: random.Random, count: int) -> TokenIds:
    return np.frombuffer(source.randbytes(4 * count), np.int32) & 0x3FFFF


def fingerprint(exchange: Exchange) -> dict[str, object]:
    """Equal for two exchanges that are the same to the bit: NaN equals NaN, and fields have an order."""
    values: dict[str, object] = {name: getattr(exchange, name) for name in exchange.__struct_fields__}
    for name, array in (("prompt_ids", exchange.prompt_ids), ("sampled_ids", exchange.sampled_ids)):
        values[name] = None if array is None else (array.dtype, array.tobytes())
    values["logprobs"] = None if exchange.logprobs is None else (exchange.logprobs.dtype, exchange.logprobs.tobytes())
    del values["checksum"]  # the store's own
    it = exchange.raw_request
    fields = [(name, bytes(raw)) for name, raw in it.fields.items()]
    values["wire"] = (fields, it.list_name, [bytes(item) for item in it.items])
    values["reply"] = msgspec.msgpack.encode(exchange.reply)
    return values

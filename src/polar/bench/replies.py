"""What the stand-in engine answers, made once: bytes of vLLM's chat API with `return_token_ids` and log-probabilities.

The token ids of a session are one sequence: the prompt of a call is the prompt of the one before, what was sampled
then, and the tool's result. So capture finds the same shared prefixes as with a real model.
"""

import random
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from polar.bench.calls import TURNS, CallSize, reply_text

RESULT_TOKENS = 200
STREAMED_TOKENS = 8
STAMP_DIGITS = 18


class EngineReply(Struct, frozen=True):
    """One reply in both forms; `events` are the stream's, first chunk first."""

    whole: bytes
    events: list[bytes]


@cache
def make_reply(size: CallSize, turn: int) -> EngineReply:
    ids = _session_ids(size)
    growth = size.sampled_tokens + RESULT_TOKENS
    first = max(1, size.prompt_tokens - growth * (TURNS - 1) // 2)
    start = first + growth * turn
    prompt, sampled = ids[:start], ids[start : start + size.sampled_tokens]
    text = reply_text(size, turn)
    step = -(-len(text) // size.sampled_tokens)
    tokens = [text[step * index : step * (index + 1)] for index in range(size.sampled_tokens)]
    logprobs = [_logprob(token, index) for index, token in enumerate(tokens)]
    usage = {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(sampled),
        "completion_tokens": len(sampled),
    }
    call = {
        "id": f"call_{turn}",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls", "timeout": 30}'},
    }
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [call],
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": sampled,
    }
    whole = {
        **_head("chat.completion"),
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "kv_transfer_params": None,
    }
    shown = min(STREAMED_TOKENS, size.sampled_tokens)
    events = [_first(prompt), *(_token(tokens[n], logprobs[n], sampled[n]) for n in range(shown)), *_end(usage)]
    return EngineReply(msgspec.json.encode(whole), events)


@cache
def make_stamped_stream(size: CallSize) -> tuple[bytes, bytes, bytes, bytes]:
    """A stream whose tokens say when they were sent: its first event, what stands before and after the stamp in
    each token's event, and its end."""
    prompt = _session_ids(size)[: size.prompt_tokens]
    stamp = "~" + "0" * STAMP_DIGITS
    before, after = _token(stamp, _logprob(" token", 0), 4711).split(stamp.encode())
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt), "completion_tokens": 0}
    return _first(prompt), before + b"~", after, b"".join(_end(usage))


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-b2c9a7d1e5f04c63", "object": kind, "created": 1_760_000_000, "model": "bench"}


def _event(choices: list[Any], **more: Any) -> bytes:
    return b"data: " + msgspec.json.encode({**_head("chat.completion.chunk"), "choices": choices, **more}) + b"\n\n"


def _choice(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None, **more}


def _first(prompt: list[int]) -> bytes:
    return _event([_choice({"role": "assistant", "content": ""})], prompt_token_ids=prompt)


def _token(text: str, logprob: dict[str, Any], token_id: int) -> bytes:
    return _event([_choice({"content": text}, logprobs={"content": [logprob]}, token_ids=[token_id])])


def _end(usage: dict[str, int]) -> list[bytes]:
    last = _event([_choice({"content": ""}, finish_reason="stop", stop_reason=None, token_ids=[])])
    return [last, _event([], usage=usage), b"data: [DONE]\n\n"]


def _logprob(token: str, index: int) -> dict[str, Any]:
    value = -((index * 7919) % 1000 + 1) / 317.0
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}


@cache
def _session_ids(size: CallSize) -> list[int]:
    rng = random.Random(size.name)
    length = size.prompt_tokens + (size.sampled_tokens + RESULT_TOKENS) * (TURNS + 1)
    return [rng.randrange(100, 151_000) for _ in range(length)]

"""What an engine sends: whole replies and streams, byte by byte as vLLM writes them."""

import json
from typing import Any


def encode(body: Any) -> bytes:
    """As servers and clients write JSON; NaN and infinities as careless ones do."""
    return json.dumps(body, separators=(",", ":")).encode()


def response(body: bytes, status: str = "200 OK", content_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


def stream(*pieces: bytes) -> bytes:
    """A whole answer: these pieces as a chunked stream."""
    return STREAM_HEAD + chunked(*pieces)


def event(**fields: Any) -> bytes:
    return b"data: " + encode(fields) + b"\n\n"


DONE = b"data: [DONE]\n\n"


# Chat completions

PROMPT = [5, 6, 7]


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {}, **fields}


def begin(prompt: Any = PROMPT) -> bytes:
    return event(choices=[choice(delta={"role": "assistant", "content": ""})], prompt_token_ids=prompt)


def token(text: str, id: Any, logprob: Any = -0.5) -> bytes:
    logprobs = {"content": [{"token": text, "logprob": logprob}]}
    return event(choices=[choice(delta={"content": text}, token_ids=[id], logprobs=logprobs)])


def finish(reason: str = "stop") -> bytes:
    return event(
        choices=[choice(finish_reason=reason, token_ids=[2], logprobs={"content": [{"token": "", "logprob": -0.1}]})]
    )


def usage(prompt: Any = 3, completion: Any = 3) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


GOOD = [begin(), token("one ", 11), token("two", 12), finish(), usage(), DONE]


def whole(**fields: Any) -> bytes:
    """A whole chat completion; `fields` replace those of its choice, and a few of its top."""
    top = {name: fields.pop(name) for name in ("usage", "prompt_token_ids", "choices") if name in fields}
    message = {
        "index": 0,
        "message": {"role": "assistant", "content": "one two"},
        "token_ids": [11, 12, 2],
        "logprobs": {"content": [{"token": "x", "logprob": -0.5}] * 3},
        "finish_reason": "stop",
    }
    reply = {
        "choices": [message | fields],
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": 3, "completion_tokens": 3},
    }
    return encode(reply | top)


def completion(text: str = "one two") -> bytes:
    """The same from the legacy route."""
    fields = {"text": text, "logprobs": {"token_logprobs": [-0.5, -0.5, -0.1]}}
    return whole(**fields)

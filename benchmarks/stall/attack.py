"""A caller that sends the longest bodies it may, one after the other: `python -m benchmarks.stall.attack PORT KEY`.

A line on its standard input names the kind of body, and an empty one has it stop; it then prints what it got.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec import Struct

from benchmarks.process import print_message
from benchmarks.stall.engine import CONTEXT_LENGTH

HALF_SENT = 300  # connections
_GIANT = 30 * 1024 * 1024


class StatusCounts(Struct):
    """How often which status came back."""

    statuses: dict[int, int]


def _encode_chat(text: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text


def _make_words(size: int) -> bytes:
    """Text that nobody has sent before."""
    return random.randbytes(size // 4 + 1).hex(" ", 2)[:size].encode()


def _encode_arguments(arguments: bytes) -> bytes:
    call = b'{"id":"c","type":"function","function":{"name":"f","arguments":%b}}' % msgspec.json.encode(
        arguments.decode()
    )
    turns = b'{"role":"assistant","tool_calls":[%b]},{"role":"tool","tool_call_id":"c","content":"ok"}' % call
    return b'{"model":"m","messages":[{"role":"user","content":"hi"},%b]}' % turns


def _make_numbers() -> bytes:
    return b'{"n":[%b],"at":%d}' % (b",".join(b"%d" % (n % 10) for n in range(40_000)), random.getrandbits(60))


def _encode_messages() -> bytes:
    messages = b",".join(b'{"role":"user","content":"%d"}' % random.randrange(1000) for _ in range(8_000))
    return b'{"model":"m","messages":[%b]}' % messages


def _encode_picture() -> bytes:
    data = b"A" * (8 * 1024 * 1024)
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % data
    return b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % part


BODIES: dict[str, Callable[[], bytes]] = {
    "a full context of new text": lambda: _encode_chat(_make_words(CONTEXT_LENGTH * 3 // 2)),
    "text just short enough for the gateway itself": lambda: _encode_chat(_make_words(30_000)),
    "white space, a token of which is long": lambda: _encode_chat(b" " * (2 * 1024 * 1024 + random.randrange(1000))),
    "80 KB of numbers as arguments": lambda: _encode_arguments(_make_numbers()),
    "an integer of 900,000 digits": lambda: _encode_arguments(
        b'{"n":1%b}' % (b"%09d" % random.randrange(10**9) * 100_000)
    ),
    "8,000 messages": _encode_messages,
    "a picture of 8 MB": _encode_picture,
    "12 MB of text (refused)": lambda: _encode_chat(_make_words(12 * 1024 * 1024)),
    "30 MB of text (refused)": lambda: _encode_chat(b"word " * (_GIANT // 5)),
}
HALF = f"{HALF_SENT} half-sent headers"
KINDS = (*BODIES, HALF)


async def main(port: int, key: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while kind := (await lines.readline()).decode().strip():
        statuses: Counter[int] = Counter()
        work = _half_send(port) if kind == HALF else _send(port, key, BODIES[kind], statuses)
        attack = asyncio.create_task(work)
        await lines.readline()
        attack.cancel()
        await asyncio.wait({attack})
        print_message(StatusCounts(dict(statuses)))


async def _send(port: int, key: str, make: Callable[[], bytes], statuses: "Counter[int]") -> None:
    while True:
        body = make()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            line = await reader.readline()
            statuses[int(line.split()[1]) if line else 0] += 1
            await reader.read()
        except ConnectionError:  # it was refused before all of it was sent
            statuses[0] += 1
        finally:
            writer.close()


async def _half_send(port: int) -> None:
    writers = []
    try:
        for _ in range(HALF_SENT):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Half: ")
            writers.append(writer)
        await asyncio.Event().wait()
    finally:
        for writer in writers:
            writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))

"""In place of a node: it leaves notes of its life in its data folder."""

import asyncio
import os
from pathlib import Path

import msgspec

from polar.config import Settings


class Start(msgspec.Struct):
    """A line of DATA/starts: one for each time that it was served."""

    pid: int
    machine: str
    folder: str
    server_url: str
    token: str | None
    api_key: str | None
    admin_token: str | None
    port: int


async def serve_node(
    settings: Settings, data: Path, server_url: str, token: str | None, *, name: str, stop: asyncio.Event
) -> None:
    assert data.name == name
    import ray

    machine = ray.get_runtime_context().get_node_id()
    start = Start(
        os.getpid(),
        machine,
        os.getcwd(),
        server_url,
        token,
        settings.engine.api_key,
        settings.server.token,
        settings.gateway.port,
    )
    await asyncio.to_thread(_note, data / "starts", msgspec.json.encode(start))
    await stop.wait()
    await asyncio.to_thread(_note, data / "drained", b"%d" % os.getpid())


async def fail(*_: object, **__: object) -> None:
    raise RuntimeError("there is no gateway today")


def _note(file: Path, line: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as notes:
        notes.write(line + b"\n")


def starts(data: Path) -> list[Start]:
    """What it left."""
    file = data / "starts"
    return [msgspec.json.decode(line, type=Start) for line in file.read_bytes().splitlines()] if file.exists() else []


def drained(data: Path) -> list[int]:
    file = data / "drained"
    return [int(line) for line in file.read_text().split()] if file.exists() else []

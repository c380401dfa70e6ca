"""Polar's gateway as `polar up` runs it, with a watch on its event loop.

    python -m polar.bench.peers.gateway ENGINE_URL DATA_DIR

Prints its addresses, then a report of the watch for every line that it reads, until its input ends.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.bench.watch import Watch
from polar.cli.common import run
from polar.config import EngineSettings, GatewaySettings, ServerSettings, Settings
from polar.service import Service


class Addresses(Struct):
    gateway: str
    control: str


async def serve(engine_url: str, data: Path) -> None:
    settings = Settings(
        engine=EngineSettings(kind="vllm", urls=[engine_url]),
        gateway=GatewaySettings(port=0),
        server=ServerSettings(port=0),
    )
    async with Service(settings, data) as service:
        watch = Watch()
        _say(Addresses(service.gateway_url, service.control_url))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            _say(watch.report())


def _say(value: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run(serve(sys.argv[1], Path(sys.argv[2])))

"""Polar's gateway as `polar up` runs it, with a watch on its event loop when one is asked for.

    python -m polar.bench.peers.gateway ENGINE_URL DATA_DIR [TOKENIZER_DIR]

Prints its addresses. A line on its standard input begins a watch, the next one ends it and has its report printed,
and so on until the input ends.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.bench.loop_watch import LoopWatch
from polar.cli.common import run_async
from polar.config import EngineSettings, GatewaySettings, ServerSettings, Settings
from polar.gateway.process import tune_process
from polar.service import Service


class GatewayAddresses(Struct):
    gateway: str
    control: str


async def serve(engine_url: str, data: Path, tokenizer: str | None = None) -> None:
    settings = Settings(
        engine=EngineSettings(kind="vllm", urls=[engine_url], tokenizer=tokenizer),
        gateway=GatewaySettings(port=0),
        server=ServerSettings(port=0),
    )
    tune_process()
    async with Service(settings, data) as service:
        _say(GatewayAddresses(service.gateway_url, service.control_url))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        watch: LoopWatch | None = None
        while await reader.readline():
            if watch is None:
                watch = LoopWatch()
            else:
                _say(watch.report())
                watch = None


def _say(value: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_async(serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))

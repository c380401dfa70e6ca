"""The service of `make bench-verify`, with a node and the scripted engine at a URL.

    python -m benchmarks.verify.server ENGINE_URL TOKENIZER_DIR DATA_DIR

It prints its address, and ends with its input.
"""

import sys
from pathlib import Path

from benchmarks.process import Address, print_message, run_async, wait_for_input_end
from polar.config import EngineSettings, GatewaySettings, ServerSettings, Settings
from polar.gateway.process import tune_process
from polar.service import Service


async def serve(engine_url: str, tokenizer: str, data: Path) -> None:
    engine = EngineSettings.model_validate({"kind": "scripted", "urls": [engine_url], "tokenizer": tokenizer})
    settings = Settings(engine=engine, gateway=GatewaySettings(port=0), server=ServerSettings(port=0))
    tune_process()
    async with Service(settings, data, node=True) as service:
        print_message(Address(service.control_url))
        await wait_for_input_end()


if __name__ == "__main__":
    run_async(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

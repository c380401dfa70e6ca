"""A real vLLM on loopback, and a recorder in front of it that keeps what it said, byte for byte.

`make test-engines` installs vLLM and prepares the model under .cache/engines.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web

from polar.service import Service

ROOT = Path(__file__).parents[2] / ".cache" / "engines"
MODEL = "smollm2"
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
"""Where vLLM samples: on token ids with versions, on token ids, on messages."""
OPTIONS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Takes about a minute to start. POLAR_TEST_VLLM names one that runs already."""
    if url := os.environ.get("POLAR_TEST_VLLM"):
        yield url
        return
    python = ROOT / "venv" / "bin" / "python"
    if not python.exists():
        pytest.fail("vLLM is not installed: run `make test-engines`")
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(ROOT / "model")]
    command += ["--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=os.environ | OPTIONS, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/health", server, log)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(300):
        if server.poll() is not None:
            pytest.fail(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(url, timeout=2)
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    pytest.fail(f"vLLM was not up in time:\n{log.read_text()[-3000:]}")


class Recorded(NamedTuple):
    """A model call, as the engine was asked and as it answered."""

    path: str
    request: dict[str, Any]
    reply: bytes


class Recorder:
    """Passes everything through and keeps the model calls."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.url = ""
        self.calls: list[Recorded] = []
        self.missing: set[str] = set()  # paths that are answered as a server does that has no such route

    async def run(self) -> AsyncIterator["Recorder"]:
        runner = web.ServerRunner(web.Server(self._pass, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        # A connection of its own for each call: a kept one may be closed by the server just when it is used again.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self._http:
            yield self
        await runner.cleanup()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        if request.path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        headers = {"Content-Type": "application/json"}
        async with self._http.request(
            request.method, self._upstream + request.path_qs, data=body or None, headers=headers
        ) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            await response.prepare(request)
            pieces = []
            async for piece in reply.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
            await response.write_eof()
        if request.path in (GENERATE, COMPLETIONS, CHAT):
            self.calls.append(Recorded(request.path, json.loads(body), b"".join(pieces)))
        return response


async def met(service: Service, recorder: Recorder) -> None:
    """Until the gateway has asked its engine what it does; that is not among the calls then."""
    for replica in service.pools.default.replicas:
        await replica.ensure_probed()
    recorder.calls.clear()


@pytest.fixture
async def recorder(vllm_url: str) -> AsyncIterator[Recorder]:
    async for running in Recorder(vllm_url).run():
        yield running

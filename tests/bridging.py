"""What the tests of bridges talk to: a whole Polar on loopback whose engine has a tiny model with random weights.

Its tasks: `plain-*`, two turns that are one trace; `split-*`, an agent that forgets what it said, so that each of its
three calls is a trace of its own. A session earns 1 if its last words have the letter e in them at the end, else 0.
"""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.server import EmbeddedServer
from polar.service import Service
from tests.integration.stack import settings
from tests.unit.train import tiny

TOKEN = "an-admin-token"
AGENT = Path(__file__).with_name("bridging_agent.py")


class Served(Struct):
    """Where it is. `model` is the folder of the engine's weights."""

    url: str
    engine: str
    tasks: Path
    model: Path

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of a bridge."""
        return {"server": self.url, "token": TOKEN, "tasks": [str(self.tasks)], "name": "test", "samples": 4, **more}


def task(name: str, kind: str) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": f"Say {name}.",
        "timeout_seconds": 600,
        "runtime": {"backend": "local"},
        "agent": {"custom_shell": {"command": f"{sys.executable} -S -E {AGENT} {kind}"}},
        "evaluator": {"strategy": "answer", "config": {"expected": "e.?$", "match": "regex", "pattern": "(?s)(.+)"}},
    }


def write_tasks(folder: Path) -> Path:
    file = folder / "tasks.jsonl"
    made = [task(f"{kind}-{number}", kind) for kind in ("plain", "split") for number in range(4)]
    file.write_text("\n".join(json.dumps(one) for one in made))
    return file


@contextlib.asynccontextmanager
async def serving(folder: Path, **engine_settings: Any) -> AsyncIterator[Served]:
    model = tiny.folder(folder / "model")
    options = EmbeddedOptions(device="cpu", threads=1, memory_gib=0.02)
    async with EmbeddedServer(model, options) as engine:
        wanted = settings(
            [engine.url],
            engine={"kind": "embedded", "model": str(model), **engine_settings},
            server={"port": 0, "token": TOKEN},
            node={"run_workers": 4},
        )
        async with Service(wanted, folder / "data", node=True) as service:
            yield Served(service.control_url, engine.url, write_tasks(folder), model)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """In a thread, for tests that have no loop of their own, and for trainers in other processes."""
    found: list[Served] = []
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    failed: list[BaseException] = []

    async def live() -> None:
        async with serving(folder) as one:
            found.append(one)
            ready.set()
            await done.wait()

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(live())
        except BaseException as error:  # noqa: BLE001 (told in the caller's thread)
            failed.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=main, name="served", daemon=True)
    thread.start()
    ready.wait()
    try:
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(done.set)
        thread.join()
        if failed:
            raise failed[0]

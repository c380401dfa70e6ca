"""Signs of life of a node while its event loop is busy.

A node beats from the loop that also serves its sessions' calls. Should that loop be busy for longer than a beat, this
thread repeats the last beat with a connection of its own, so that the server does not take the node for lost. The
server's answer can be ignored: it says the same to the next beat of the node itself. A loop that is busy for a minute
hangs; then nobody beats any more, and others get the node's sessions.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from polar.errors import PolarError
from polar.node.remote_server import RemoteServer
from polar.rollout.protocol import Heartbeat

log = logging.getLogger(__name__)

HANG_SECONDS = 60.0
"""Seconds without a beat of the node's own after which its loop is taken to hang."""

_LATE_BEATS = 1.5  # beats


class KeepAlive:
    """Use as a context manager. `connect` gives a connection to the server, to be opened in the thread."""

    def __init__(self, connect: Callable[[], RemoteServer]) -> None:
        self._connect = connect
        self._last_beat: tuple[float, float, str, Heartbeat] | None = None  # when, how often, by whom, what
        self._started = threading.Event()
        self._stop: Callable[[], object]
        self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)

    def __enter__(self) -> "KeepAlive":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join()

    def record(self, node_id: str, beat: Heartbeat, seconds: float) -> None:
        """The node beats by itself now, and will again in so many seconds."""
        self._last_beat = (time.monotonic(), seconds, node_id, beat)

    def forget(self) -> None:
        """The node leaves."""
        self._last_beat = None

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._watch())

    async def _watch(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        self._started.set()
        async with self._connect() as server:
            while True:
                last = self._last_beat
                if last is not None and _LATE_BEATS * last[1] < time.monotonic() - last[0] < HANG_SECONDS:
                    await self._repeat(server, last)
                await asyncio.sleep(0.1 if last is None else min(last[1] / 4, 0.5))

    async def _repeat(self, server: RemoteServer, last: tuple[float, float, str, Heartbeat]) -> None:
        _, seconds, node_id, beat = last
        try:
            async with asyncio.timeout(2 * seconds):
                await server.heartbeat(node_id, beat)
        except (PolarError, TimeoutError) as error:
            log.debug("The server did not hear that this node is busy: %r", error)

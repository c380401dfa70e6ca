"""An event loop in a thread of its own, for callers that have none, or have one that they can't wait in."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from polar.client.calls import ClientError

T = TypeVar("T")


class BackgroundLoop:
    """Its thread holds no program up that wants to end."""

    def __init__(self, on_close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`on_close` is run in the loop, last of all."""
        self._on_close = on_close
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="polar-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From any other thread. Raises ClientError where it is closed, or is closed meanwhile."""
        with self._lock:
            if not self._open:
                work.close()
                raise ClientError("The client is closed.")
            if not self._thread.is_alive():
                work.close()
                raise ClientError("The client was made before this process was forked off: make one here.")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientError("The client is closed.") from None
        except BaseException:  # Ctrl-C, say: nobody waits for it any more
            future.cancel()
            raise

    def close(self) -> None:
        """Whoever waits in `run` is let go. More than once is once."""
        with self._lock:
            if self._open:
                self._open = False
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._shut_down())
        finally:
            self._loop.close()

    async def _shut_down(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)
        await self._on_close()
        await self._loop.shutdown_asyncgens()

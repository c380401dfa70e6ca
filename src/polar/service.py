"""Everything in one process: store, engine, data plane and control plane."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import resource
import socket
import sys
from pathlib import Path
from types import TracebackType

import uvicorn

from polar.config import Settings
from polar.engines.pool import Pool
from polar.errors import ConfigError
from polar.gateway.app import Gateway
from polar.gateway.control import create_app
from polar.gateway.http import url_of
from polar.gateway.metrics import Metrics
from polar.gateway.sessions import Sessions
from polar.store import open_store
from polar.store.base import Store

log = logging.getLogger(__name__)


def settle_process() -> None:
    """Settings of the whole process for one that serves: call it once, when everything is imported.

    A full garbage collection stops every stream for as long as it takes to walk all objects. What is imported stays
    anyway, and calls leave no cycles behind: young objects are looked at in small portions, old ones hardly ever. The
    store's thread gives way to the event loop soon.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 5, 10_000)
    sys.setswitchinterval(0.0005)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each open call takes two


class Service:
    """Use as an async context manager. `control=False` leaves the control plane out (a private gateway)."""

    store: Store
    pool: Pool
    sessions: Sessions
    gateway_url: str
    control_url: str

    def __init__(self, settings: Settings, data: Path, *, control: bool = True) -> None:
        self._settings = settings
        self._data = data
        self._control = control
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Service":
        server = self._settings.server
        if self._control and not server.token and not is_loopback(server.host):
            raise ConfigError(
                f"The control plane on {server.host} would be open to everyone: set [server] token, or use 127.0.0.1."
            )
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        try:
            self._data.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Can't keep anything in {self._data}: {error.strerror}. Name a folder with --data."
            ) from error
        url = settings.store.url or f"sqlite:{self._data / 'polar.db'}"
        self.store = open_store(url, settings.store.durability)
        stack.push_async_callback(self.store.close)
        self.pool = await Pool.from_settings(settings.engine)
        stack.push_async_callback(self.pool.close)
        if settings.engine.urls:  # an engine that was launched just now holds nothing from before
            for url, version in (await self.store.policies()).items():
                self.pool.set_version(version, url)
        await self.pool.start()
        self.sessions = Sessions(self.store)
        metrics = Metrics()
        gateway = Gateway(settings, store=self.store, pool=self.pool, sessions=self.sessions, metrics=metrics)
        stack.push_async_callback(gateway.stop)
        self.gateway_url = await gateway.start()
        if self._control:
            app = create_app(
                store=self.store,
                sessions=self.sessions,
                pool=self.pool,
                metrics=metrics,
                gateway_url=self.gateway_url,
                token=settings.server.token,
            )
            listener = _listen(settings.server.host, settings.server.port)
            self.control_url = url_of(settings.server.host, listener.getsockname()[1])
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
            control = _Uvicorn(config)
            task = asyncio.create_task(control.serve(sockets=[listener]))
            stack.push_async_callback(_stop, control, task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield  # signals are ours


async def _stop(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    server.should_exit = True
    await task


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # the protocol: else Nagle may wait
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # from here on callers wait for an answer, though uvicorn still has to start
    except OSError as error:
        listener.close()
        raise ConfigError(f"Can't listen on {host}:{port}: {error.strerror}. Set [server] port.") from error
    return listener


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

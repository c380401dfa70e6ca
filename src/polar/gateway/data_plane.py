"""Store, engines and gateway in one process: all that it takes to capture calls."""

import asyncio
import contextlib
import logging
from pathlib import Path
from types import TracebackType

from polar.config import Settings
from polar.engines.fleet import EngineFleet
from polar.engines.pool import EnginePool
from polar.errors import ConfigError, StoreError
from polar.folders import make_private_folder
from polar.gateway.app import Gateway
from polar.gateway.call_journal import CallJournal, read_journal
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.session_registry import SessionRegistry
from polar.runtimes.state_folder import StateFolder
from polar.store import open_store
from polar.store.relational import RelationalStore
from polar.telemetry import tracing

log = logging.getLogger(__name__)

_JOURNAL_FILE = "calls.jsonl"


class DataPlane:
    """Use as an async context manager.

    With `hold_calls`, calls wait until somebody says how the engines are to be (EngineFleet.apply). Without `engines`
    there are none before that."""

    store: RelationalStore
    pools: EngineFleet
    sessions: SessionRegistry
    metrics: GatewayMetrics
    gateway: Gateway
    gateway_url: str

    def __init__(
        self, settings: Settings, data_folder: Path, *, engines: bool = True, hold_calls: bool = False
    ) -> None:
        self.settings = settings
        self.data_folder = data_folder
        self._engines = engines
        self._hold_calls = hold_calls or not engines
        self._stack = contextlib.AsyncExitStack()

    @property
    def pool(self) -> EnginePool:
        """The engines of runs that have none of their own."""
        return self.pools.default

    async def __aenter__(self) -> "DataPlane":
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        try:
            make_private_folder(self.data_folder)
        except OSError as error:
            raise ConfigError(
                f"Can't keep anything in {self.data_folder}: {error.strerror}. Name a folder with --data."
            ) from error
        telemetry = settings.telemetry
        await stack.enter_async_context(
            tracing.export_traces(
                telemetry.otlp_endpoint, provider=settings.engine.kind, headers=telemetry.otlp_headers
            )
        )
        url = settings.store.url or f"sqlite:{self.data_folder / 'polar.db'}"
        self.store = open_store(url, settings.store.durability)
        stack.push_async_callback(self.store.close)
        journal = await self._open_journal(stack)
        engine = settings.engine
        self.pools = await EngineFleet.from_settings(engine) if self._engines else EngineFleet(engine)
        stack.push_async_callback(self.pools.close)
        for url, version in (await self.load_policy_versions()).items():
            self.pool.set_version(version, url)
        await (self.pools.start_held() if self._hold_calls else self.pools.start())
        self.sessions = SessionRegistry(self.store)
        self.metrics = GatewayMetrics()
        self.metrics.watch_pools(self.pools.get_pools_by_run)
        self.gateway = Gateway(
            settings,
            store=self.store,
            journal=journal,
            pools=self.pools,
            sessions=self.sessions,
            metrics=self.metrics,
        )
        stack.push_async_callback(self.gateway.stop)
        self.gateway_url = await self.gateway.start()

    async def _open_journal(self, stack: contextlib.AsyncExitStack) -> CallJournal:
        """The journal of this process's calls. Calls in the journals of dead processes on this folder are recorded as
        interrupted."""
        state = StateFolder(self.data_folder / "gateways")
        for left in state.iter_abandoned():
            interrupted = await self.store.record_interrupted(read_journal(left.folder / _JOURNAL_FILE))
            if interrupted:
                log.warning(
                    "%d calls were under way when their gateway's process ended: interrupted.", len(interrupted)
                )
            await asyncio.to_thread(left.remove)
        await asyncio.to_thread(state.lock)
        journal = CallJournal(state.folder / _JOURNAL_FILE)
        stack.push_async_callback(self._close_journal, journal, state)
        return journal

    async def _close_journal(self, journal: CallJournal, state: StateFolder) -> None:
        """All calls have ended. Those that could not be recorded are, as interrupted, now or by the next process."""
        journal.close()
        try:
            await self.store.record_interrupted(journal.running)
        except StoreError as error:
            log.warning("Calls that were not recorded are looked after by the next process: %s", error)
            return
        await asyncio.to_thread(state.close)

    def check_engine(self) -> None:
        """Raises ConfigError where no engine answers, for what would otherwise start and find out call by call."""
        replicas = self.pool.replicas
        if all(replica.down for replica in replicas):
            urls = ", ".join(replica.url for replica in replicas) or "any address"
            raise ConfigError(f"No engine answers at {urls}: start it, or name another ([engine] urls, --engine).")

    async def load_policy_versions(self) -> dict[str, int]:
        """The version that each engine holds, by address, as far as it is known. An engine that was launched with this
        process holds what it began with, whatever was at its address before."""
        return await self.store.policy_versions() | self.pool.launched_versions

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

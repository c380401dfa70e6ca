"""The kinds of runtimes that there are on this node."""

import asyncio
import logging
from pathlib import Path

from polar.errors import ConfigError
from polar.plugins import load, load_all
from polar.runtimes.base import RuntimeBackend, SandboxError

log = logging.getLogger(__name__)


class RuntimeBackends:
    def __init__(self, state: Path, gateway_url: str, allowed: list[str]) -> None:
        self._state = state
        self._gateway_url = gateway_url
        self._allowed = allowed or list(load_all("runtimes"))
        self._backends: dict[str, RuntimeBackend] = {}
        self._problems: dict[str, str | None] = {}
        self._availability_lock = asyncio.Lock()

    async def get(self, backend: str) -> RuntimeBackend:
        """Raises ConfigError where this node has none of that kind, with what to do."""
        kind = self._load(backend)
        async with self._availability_lock:
            if self._problems.get(backend, "not asked yet") is not None:  # it may have been started since
                self._problems[backend] = await kind.check_availability()
        if (why := self._problems[backend]) is not None:
            raise ConfigError(f"No runtime of kind {backend} can be made here. {why}")
        return kind

    def _load(self, backend: str) -> RuntimeBackend:
        if backend not in self._backends:
            made = load("runtimes", backend)
            if backend not in self._allowed:
                raise ConfigError(f"[node] runtimes does not allow {backend} here: it has {', '.join(self._allowed)}.")
            self._backends[backend] = made(self._state, self._gateway_url)
        return self._backends[backend]

    async def list_available(self) -> list[str]:
        """Those that runtimes can be made of here, now."""
        found = []
        for backend in self._allowed:
            try:
                await self.get(backend)
            except ConfigError as error:
                log.info("%s", error)
            else:
                found.append(backend)
        return found

    async def sweep(self) -> list[str]:
        """Removes what a node that is no more left behind; the ids of its runtimes."""
        swept = []
        for backend in self._allowed:
            try:
                swept += await (await self.get(backend)).sweep()
            except (ConfigError, SandboxError) as error:
                log.info("Nothing was swept of %s: %s", backend, error)
        return swept

    async def close(self) -> None:
        for kind in self._backends.values():
            await kind.close()

"""The runtimes of a node: backends, warm runtimes, and snapshots of workspaces before the agent ran.

A recipe is everything that a runtime is made from: its backend, its spec and its prepare steps.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from polar.errors import ConfigError, PolarError
from polar.node.stages import Stage
from polar.plugins import load, load_all
from polar.records.task import Step
from polar.runtimes.base import Runtime, RuntimeBackend, RuntimeSpec, SandboxError, TransferTooLargeError
from polar.runtimes.prepare_steps import PrepareError, run_prepare_steps
from polar.runtimes.state_folder import remove_tree

log = logging.getLogger(__name__)

MAX_WORKSPACE_BYTES = 256 << 20
"""Of a workspace snapshot."""


class RuntimeBackends:
    """The runtime backends of this node, loaded when they are first needed."""

    def __init__(self, state: Path, gateway_url: str, allowed: list[str]) -> None:
        self._state = state
        self._gateway_url = gateway_url
        self._allowed = allowed or list(load_all("runtimes"))
        self._backends: dict[str, RuntimeBackend] = {}
        self._problems: dict[str, str | None] = {}
        self._availability_lock = asyncio.Lock()

    async def get(self, backend: str) -> RuntimeBackend:
        """Raises ConfigError, with advice, where the backend does not work here."""
        kind = self._load(backend)
        async with self._availability_lock:
            if self._problems.get(backend, "not checked yet") is not None:  # it may work by now
                self._problems[backend] = await kind.check_availability()
        if (problem := self._problems[backend]) is not None:
            raise ConfigError(f"The runtime backend {backend} does not work here. {problem}")
        return kind

    def _load(self, backend: str) -> RuntimeBackend:
        if backend not in self._backends:
            backend_type = load("runtimes", backend)
            if backend not in self._allowed:
                raise ConfigError(f"[node] runtimes does not allow {backend}; it allows {', '.join(self._allowed)}.")
            self._backends[backend] = backend_type(self._state, self._gateway_url)
        return self._backends[backend]

    async def list_available(self) -> list[str]:
        """Names of the allowed backends that work here now."""
        available = []
        for backend in self._allowed:
            try:
                await self.get(backend)
            except ConfigError as error:
                log.info("%s", error)
            else:
                available.append(backend)
        return available

    async def sweep(self) -> list[str]:
        """Removes what dead nodes left behind. Returns the ids of their runtimes."""
        swept = []
        for backend in self._allowed:
            try:
                swept += await (await self.get(backend)).sweep()
            except (ConfigError, SandboxError) as error:
                log.info("The backend %s could not be swept: %s", backend, error)
        return swept

    async def close(self) -> None:
        for kind in self._backends.values():
            await kind.close()


class RuntimeRecipe(Struct, frozen=True):
    backend: str
    spec: RuntimeSpec
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> str:
        return repr(self)


class _Stock(Struct):
    recipe: RuntimeRecipe
    ready: deque[Runtime]
    reserved: int = 0  # runtimes that the operator wants ready
    expected: int = 0  # sessions that will take one
    making: int = 0
    failed: bool = False  # the last one could not be made: none is made until one is taken


class WarmPool:
    """Keeps runtimes ready ahead of time.

    For each recipe, the pool keeps as many runtimes as the operator reserved, and one for each running session whose
    grader will need one, up to a limit. Only their prepare steps have run in them.
    """

    def __init__(
        self, runtime_backends: RuntimeBackends, scratch: Callable[[str], Path], *, max_launches: int, max_expected: int
    ) -> None:
        """Makes up to `max_launches` at a time, and keeps up to `max_expected` of a recipe for expected sessions."""
        self._runtime_backends = runtime_backends
        self._scratch = scratch
        self._max_expected = max_expected
        self._launch_stage = Stage("warm", max_launches)
        self._stocks: dict[str, _Stock] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    def reserve(self, recipe: RuntimeRecipe, count: int) -> None:
        """Keeps `count` more runtimes ready from now on."""
        stock = self._get_stock(recipe)
        stock.reserved += count
        self._restock(stock)

    def expect(self, recipe: RuntimeRecipe) -> None:
        """Announces that a session will take one."""
        stock = self._get_stock(recipe)
        stock.expected += 1
        self._restock(stock)

    def cancel_expected(self, recipe: RuntimeRecipe) -> None:
        """Takes back an announcement of `expect`."""
        stock = self._get_stock(recipe)
        stock.expected -= 1
        self._restock(stock)

    async def take(self, recipe: RuntimeRecipe, *, expected: bool = False) -> Runtime:
        """A ready runtime, else a new one; the caller removes it. `expected`: the caller was announced by `expect`.
        Raises SandboxError, and PrepareError where a step fails."""
        stock = self._stocks.get(recipe.key)
        if stock is None:
            return await self._make(recipe)
        runtime = stock.ready.popleft() if stock.ready else None
        stock.expected -= expected
        stock.failed = False
        self._restock(stock)
        return runtime or await self._make(recipe)

    def _get_stock(self, recipe: RuntimeRecipe) -> _Stock:
        return self._stocks.setdefault(recipe.key, _Stock(recipe, deque()))

    def _restock(self, stock: _Stock) -> None:
        target = 0 if self._closed else stock.reserved + min(stock.expected, self._max_expected)
        while len(stock.ready) > target:
            self._spawn(stock.ready.pop().remove(), self._removing)
        if not stock.failed:
            for _ in range(target - len(stock.ready) - stock.making):
                stock.making += 1
                self._spawn(self._add_runtime(stock), self._making)
        if not (stock.ready or stock.making or stock.expected or stock.reserved):
            self._stocks.pop(stock.recipe.key, None)

    def _spawn(self, work: "asyncio._CoroutineLike[None]", tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _add_runtime(self, stock: _Stock) -> None:
        try:
            # A runtime that a grader will soon take is more urgent than a reserve.
            async with self._launch_stage.slot(priority=int(stock.expected > 0)):
                runtime = await self._make(stock.recipe)
        except PolarError as error:
            stock.failed = True  # the next `take` makes one itself, and raises the error
            log.warning("A runtime could not be made ahead of time: %s", error)
        else:
            stock.ready.append(runtime)
        finally:
            stock.making -= 1
        self._restock(stock)

    async def _make(self, recipe: RuntimeRecipe) -> Runtime:
        kind = await self._runtime_backends.get(recipe.backend)
        id = f"rt-{secrets.token_hex(8)}"
        runtime = await kind.create(id, recipe.spec)
        log_file = self._scratch(f"{id}.log")
        try:
            await runtime.start()
            await run_prepare_steps(runtime, recipe.steps, log=log_file)
        except OSError as error:
            await runtime.remove()
            raise SandboxError(f"The backend {recipe.backend} could not make a runtime: {error}.") from error
        except BaseException:
            await asyncio.shield(runtime.remove())
            raise
        finally:
            log_file.unlink(missing_ok=True)
        return runtime

    async def close(self) -> None:
        self._closed = True
        for task in self._making:
            task.cancel()
        while tasks := self._making | self._removing:
            await asyncio.wait(tasks)
        for stock in self._stocks.values():
            for runtime in stock.ready:
                await runtime.remove()
        self._stocks.clear()


class _Snapshot(Struct):
    path: Path
    copying: "asyncio.Task[Path | None]"
    users: int = 0


class WorkspaceSnapshots:
    """Copies of workspaces from before their agents ran, shared by concurrent sessions of a recipe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots: dict[str, _Snapshot] = {}
        self._count = 0

    async def acquire(self, recipe: RuntimeRecipe, runtime: Runtime) -> Path | None:
        """The workspace of a freshly prepared runtime; None where it is too large to copy. The caller must release it,
        unless this raises."""
        snapshot = self._snapshots.get(recipe.key)
        if snapshot is None:
            self._count += 1
            path = self._folder / f"before-{self._count}"
            snapshot = _Snapshot(path, asyncio.get_running_loop().create_task(_copy_workspace(runtime, path)))
            self._snapshots[recipe.key] = snapshot
        snapshot.users += 1
        try:
            return await asyncio.shield(snapshot.copying)
        except BaseException:
            await self.release(recipe)
            raise

    async def release(self, recipe: RuntimeRecipe) -> None:
        snapshot = self._snapshots[recipe.key]
        snapshot.users -= 1
        if not snapshot.users:
            del self._snapshots[recipe.key]
            await asyncio.wait([snapshot.copying])
            await asyncio.to_thread(remove_tree, snapshot.path)


async def _copy_workspace(runtime: Runtime, path: Path) -> Path | None:
    try:
        await runtime.get(runtime.spec.workdir, path, max_bytes=MAX_WORKSPACE_BYTES, all_links=True)
    except TransferTooLargeError:
        return None
    except FileNotFoundError as error:
        raise PrepareError(
            f"runtime.workdir {runtime.spec.workdir} is not a folder (links don't count): name another one."
        ) from error
    return path

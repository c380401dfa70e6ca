"""Runtimes that stand ready before anybody asks for them.

A recipe is all that a runtime is made by: its kind, its spec and the steps that prepare it. For each recipe that is
wanted there is a number of runtimes to have ready: those that the operator asked for, and one for each session whose
agent runs now and whose grader will want one, up to a limit. Nothing has ever run in them but their steps.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from polar.errors import PolarError
from polar.node.runtime_backends import RuntimeBackends
from polar.node.stages import Stage
from polar.records.task import Step
from polar.runtimes.base import Runtime, RuntimeSpec, SandboxError
from polar.runtimes.prepare_steps import run_prepare_steps

log = logging.getLogger(__name__)


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
    reserved: int = 0  # as the operator wants it
    expected: int = 0  # sessions that will come for one
    making: int = 0
    failed: bool = False  # the last one could not be made: nobody tries again until one is asked for


class WarmPool:
    def __init__(
        self, runtime_backends: RuntimeBackends, scratch: Callable[[str], Path], *, max_launches: int, max_expected: int
    ) -> None:
        """`launching` are made at the same time; `most` stand ready of one recipe for those that will come."""
        self._runtime_backends = runtime_backends
        self._scratch = scratch
        self._max_expected = max_expected
        self._launch_stage = Stage("warm", max_launches)
        self._stocks: dict[str, _Stock] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    def reserve(self, recipe: RuntimeRecipe, count: int) -> None:
        """Has so many ready, always."""
        shelf = self._stock(recipe)
        shelf.reserved += count
        self._restock(shelf)

    def expect(self, recipe: RuntimeRecipe) -> None:
        """Somebody will come for one."""
        shelf = self._stock(recipe)
        shelf.expected += 1
        self._restock(shelf)

    def cancel_expected(self, recipe: RuntimeRecipe) -> None:
        """One who was expected does not come."""
        shelf = self._stock(recipe)
        shelf.expected -= 1
        self._restock(shelf)

    async def take(self, recipe: RuntimeRecipe, *, expected: bool = False) -> Runtime:
        """One that stands ready, else one that is made now. It is the caller's to remove. Raises SandboxError, and
        PrepareError where a step fails. `expected` are those whom `expect` has announced."""
        shelf = self._stocks.get(recipe.key)
        if shelf is None:
            return await self._make(recipe)
        runtime = shelf.ready.popleft() if shelf.ready else None
        shelf.expected -= expected
        shelf.failed = False
        self._restock(shelf)
        return runtime or await self._make(recipe)

    def _stock(self, recipe: RuntimeRecipe) -> _Stock:
        return self._stocks.setdefault(recipe.key, _Stock(recipe, deque()))

    def _restock(self, shelf: _Stock) -> None:
        wanted = 0 if self._closed else shelf.reserved + min(shelf.expected, self._max_expected)
        while len(shelf.ready) > wanted:
            self._spawn(shelf.ready.pop().remove(), self._removing)
        if not shelf.failed:
            for _ in range(wanted - len(shelf.ready) - shelf.making):
                shelf.making += 1
                self._spawn(self._add_one(shelf), self._making)
        if not (shelf.ready or shelf.making or shelf.expected or shelf.reserved):
            self._stocks.pop(shelf.recipe.key, None)

    def _spawn(self, work: "asyncio._CoroutineLike[None]", tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _add_one(self, shelf: _Stock) -> None:
        try:
            # What a grader will soon come for is more urgent than what merely stands by.
            async with self._launch_stage.slot(priority=int(shelf.expected > 0)):
                runtime = await self._make(shelf.recipe)
        except PolarError as error:
            shelf.failed = True  # whoever comes for one makes it, and is told
            log.warning("A runtime could not be made ready ahead of time: %s", error)
        else:
            shelf.ready.append(runtime)
        finally:
            shelf.making -= 1
        self._restock(shelf)

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
            raise SandboxError(f"A runtime of kind {recipe.backend} could not be made: {error}.") from error
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
        for shelf in self._stocks.values():
            for runtime in shelf.ready:
                await runtime.remove()
        self._stocks.clear()

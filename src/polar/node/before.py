"""The workspace as it was before any agent: one copy for all sessions whose runtimes are prepared alike."""

import asyncio
from pathlib import Path

from msgspec import Struct

from polar.node.warm import Recipe
from polar.runtimes.base import Runtime, TooLarge
from polar.runtimes.preparing import PrepareError
from polar.runtimes.state import remove_tree

MOST = 256 << 20  # bytes of a workspace that is kept


class _Copy(Struct):
    path: Path
    taken: "asyncio.Task[Path | None]"
    users: int = 0


class Before:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: dict[str, _Copy] = {}
        self._made = 0

    async def take(self, recipe: Recipe, runtime: Runtime) -> Path | None:
        """The workspace of a runtime that was just prepared; None where it is too large to keep. To be
        released in the end, unless this raises."""
        copy = self._copies.get(recipe.key)
        if copy is None:
            self._made += 1
            path = self._folder / f"before-{self._made}"
            copy = _Copy(path, asyncio.get_running_loop().create_task(_take(runtime, path)))
            self._copies[recipe.key] = copy
        copy.users += 1
        try:
            return await asyncio.shield(copy.taken)
        except BaseException:
            await self.release(recipe)
            raise

    async def release(self, recipe: Recipe) -> None:
        copy = self._copies[recipe.key]
        copy.users -= 1
        if not copy.users:
            del self._copies[recipe.key]
            await asyncio.wait([copy.taken])
            await asyncio.to_thread(remove_tree, copy.path)


async def _take(runtime: Runtime, path: Path) -> Path | None:
    try:
        await runtime.get(runtime.spec.workdir, path, max_bytes=MOST, all_links=True)
    except TooLarge:
        return None
    except FileNotFoundError as error:
        raise PrepareError(
            f"The workdir {runtime.spec.workdir} is no folder (a link is none): name another."
        ) from error
    return path

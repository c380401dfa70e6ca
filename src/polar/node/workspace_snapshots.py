"""The workspace as it was before any agent: one copy for all sessions whose runtimes are prepared alike."""

import asyncio
from pathlib import Path

from msgspec import Struct

from polar.node.warm_pool import RuntimeRecipe
from polar.runtimes.base import Runtime, TransferTooLargeError
from polar.runtimes.prepare_steps import PrepareError
from polar.runtimes.state_folder import remove_tree

MAX_WORKSPACE_BYTES = 256 << 20  # bytes of a workspace that is kept


class _Snapshot(Struct):
    path: Path
    copying: "asyncio.Task[Path | None]"
    users: int = 0


class WorkspaceSnapshots:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots: dict[str, _Snapshot] = {}
        self._count = 0

    async def acquire(self, recipe: RuntimeRecipe, runtime: Runtime) -> Path | None:
        """The workspace of a runtime that was just prepared; None where it is too large to keep. To be
        released in the end, unless this raises."""
        copy = self._snapshots.get(recipe.key)
        if copy is None:
            self._count += 1
            path = self._folder / f"before-{self._count}"
            copy = _Snapshot(path, asyncio.get_running_loop().create_task(_copy_workspace(runtime, path)))
            self._snapshots[recipe.key] = copy
        copy.users += 1
        try:
            return await asyncio.shield(copy.copying)
        except BaseException:
            await self.release(recipe)
            raise

    async def release(self, recipe: RuntimeRecipe) -> None:
        copy = self._snapshots[recipe.key]
        copy.users -= 1
        if not copy.users:
            del self._snapshots[recipe.key]
            await asyncio.wait([copy.copying])
            await asyncio.to_thread(remove_tree, copy.path)


async def _copy_workspace(runtime: Runtime, path: Path) -> Path | None:
    try:
        await runtime.get(runtime.spec.workdir, path, max_bytes=MAX_WORKSPACE_BYTES, all_links=True)
    except TransferTooLargeError:
        return None
    except FileNotFoundError as error:
        raise PrepareError(
            f"The workdir {runtime.spec.workdir} is no folder (a link is none): name another."
        ) from error
    return path

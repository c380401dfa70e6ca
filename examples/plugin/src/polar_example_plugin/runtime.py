"""`template`: commands of this machine (as `local`), in a workspace that begins as a copy of a folder.

A task names the folder as its image. Everything else is `local`'s, which this backend owns and delegates to.
"""

from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from polar.runtimes.base import Runtime, RuntimeSpec
from polar.runtimes.local import Local


class TemplateRuntime:
    """A local runtime whose workspace is filled when it starts."""

    def __init__(self, inner: Runtime, template: Path) -> None:
        self._inner = inner
        self._template = template

    async def start(self) -> None:
        await self._inner.start()
        await self._inner.put(self._template, self._inner.spec.workdir)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TemplateBackend:
    name = "template"

    def __init__(self, state: Path, gateway: str) -> None:
        self._local = Local(state, gateway)

    async def check_availability(self) -> str | None:
        return await self._local.check_availability()

    def check_image(self, image: str | None) -> str | None:
        if image is None or Path(image).is_dir():
            return None
        return f"{image} is no folder: name the one that the workspace begins as in runtime.image."

    async def prepare(self, image: str | None) -> None:  # noqa: ARG002  nothing to make ready of a folder
        await self._local.prepare(None)

    async def create(self, id: str, spec: RuntimeSpec) -> Runtime:
        inner = await self._local.create(id, replace(spec, image=None))
        return inner if spec.image is None else cast(Runtime, TemplateRuntime(inner, Path(spec.image)))

    def trial_image(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def list_isolation_gaps(self) -> list[str]:
        return self._local.list_isolation_gaps()

    async def sweep(self) -> list[str]:
        return await self._local.sweep()

    async def close(self) -> None:
        await self._local.close()

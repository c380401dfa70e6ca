"""The images that containers are made of: names that the engine or its registry knows, and folders with a Dockerfile.

`build:FOLDER` is built once by each node for each content of the folder: its tag is a hash over names, modes and bytes,
so that a change of any file is another image. That nothing has changed since an earlier node is for the engine to find
out, which knows what a Dockerfile starts from; that comes from the engine, or from the registry that it asks.
"""

import asyncio
import hashlib
import os
import stat
from pathlib import Path

from msgspec import Struct

from polar.runtimes.base import SandboxError
from polar.runtimes.container_cli import ContainerCli, ContainerCliError

_BUILD_PREFIX = "build:"
_BUILT_REPOSITORY = "localhost/polar-build"
_BUILD_TIMEOUT_SECONDS = 3600.0  # to fetch or to build one
_MAX_LOG_TAIL_CHARS = 4000  # characters of what a failed build printed


class ContainerImage(Struct, frozen=True):
    name: str  # the engine's
    user: str  # that commands run as


class ContainerImages:
    """Those of one engine. Made once, they are taken to be there until `forget` says otherwise."""

    def __init__(self, cli: ContainerCli) -> None:
        self._cli = cli
        self._tasks: dict[str, asyncio.Task[ContainerImage]] = {}  # or being made so
        self._tags: dict[Path, tuple[bytes, str]] = {}  # of folders, by how their files looked

    async def ensure(self, image: str) -> ContainerImage:
        """Fetches or builds what is not here; for those who ask at the same time, once."""
        folder = Path(image.removeprefix(_BUILD_PREFIX)) if image.startswith(_BUILD_PREFIX) else None
        name = image if folder is None else await asyncio.to_thread(self._compute_tag, folder)
        if (making := self._tasks.get(name)) is None:
            making = asyncio.create_task(self._fetch_or_build(name, folder))
            self._tasks[name] = making
            making.add_done_callback(lambda made: self._forget_failed(name, made))
        return await asyncio.shield(making)

    def forget(self, image: ContainerImage) -> None:
        """It is gone from the engine (somebody pruned it): whoever asks next has it made again."""
        made = self._tasks.get(image.name)
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return  # it is being made again already
        if made.result() is image:
            del self._tasks[image.name]

    def _forget_failed(self, name: str, made: "asyncio.Task[ContainerImage]") -> None:
        if made.cancelled() or made.exception() is not None:
            del self._tasks[name]  # whoever asks next tries again

    async def _fetch_or_build(self, name: str, folder: Path | None) -> ContainerImage:
        if folder is not None:
            await self._build(name, folder)
            return ContainerImage(name, await self._inspect_user(name) or "0")
        try:
            user = await self._inspect_user(name)
        except ContainerCliError:
            await self._pull(name)
            user = await self._inspect_user(name)
        return ContainerImage(name, user or "0")

    async def _inspect_user(self, name: str) -> str:
        return await self._cli.call("image", "inspect", "--format", "{{.Config.User}}", name)

    async def _pull(self, name: str) -> None:
        try:
            await self._cli.call("pull", "--quiet", name, seconds=_BUILD_TIMEOUT_SECONDS, cancellable=True)
        except ContainerCliError as error:
            raise SandboxError(f"The image {name} is not here, and can't be fetched: {error}") from error

    async def _build(self, name: str, folder: Path) -> None:
        arguments = ("build", "--force-rm", "--tag", name, str(folder))  # a step that fails leaves no container
        try:
            await self._cli.call(*arguments, seconds=_BUILD_TIMEOUT_SECONDS, cancellable=True)
        except ContainerCliError as error:
            raise SandboxError(f"The image of {folder} can't be built: {str(error)[-_MAX_LOG_TAIL_CHARS:]}") from error

    def _compute_tag(self, folder: Path) -> str:
        if not folder.is_absolute() or not (folder / "Dockerfile").is_file():
            raise SandboxError(
                f"The image {_BUILD_PREFIX}{folder} must be the absolute path of a folder with a Dockerfile."
            )
        looks = _hash_folder(folder, contents=False)
        if (known := self._tags.get(folder)) is None or known[0] != looks:
            known = looks, f"{_BUILT_REPOSITORY}:{_hash_folder(folder, contents=True).hex()[:32]}"
            self._tags[folder] = known
        return known[1]

    async def close(self) -> None:
        """Breaks off what is still being fetched or built."""
        making = list(self._tasks.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self._tasks.clear()


def _hash_folder(folder: Path, *, contents: bool) -> bytes:
    """Over everything in a folder: what it holds, or (which is quicker) how that looks."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        digest.update(os.fsencode(path.relative_to(folder)) + f"\0{found.st_mode:o}\0".encode())
        if not contents:
            digest.update(f"{found.st_size} {found.st_mtime_ns} {found.st_ino}\0".encode())
        elif stat.S_ISLNK(found.st_mode):
            digest.update(os.fsencode(os.readlink(path)) + b"\0")
        elif stat.S_ISREG(found.st_mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()

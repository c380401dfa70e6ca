"""The contract for kinds whose runtimes are containers, and what it asks of these besides."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.runtimes.base import Limits, SandboxError
from polar.runtimes.containers import STATE_LABEL
from tests.contract.image import OTHER, PLAIN, ensure_image
from tests.contract.runtimes import EVERYTHING, Place, RuntimeContract

WAIT = "until [ -e up ]; do sleep 0.02; done"


class ContainerContract(RuntimeContract):
    promises = EVERYTHING - {"disk"}  # but for engines that store on XFS with quotas
    image = PLAIN
    many = 16

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The engine's program, with the images that the tests need."""
        kind = cls.kind_class(tmp_path_factory.mktemp("state"), "http://127.0.0.1:9")
        if (why := asyncio.run(kind.unavailable())) is not None:
            pytest.skip(f"no {kind.name} here: {why}")
        for image in (PLAIN, OTHER):
            ensure_image(kind.name, image)
        return str(kind.name)

    @pytest.fixture(autouse=True)
    def no_container_is_left(self, engine: str, tmp_path: Path) -> Iterator[None]:
        yield
        assert _call(engine, "ps", "--all", "--quiet", "--filter", f"label={STATE_LABEL}={tmp_path / 'state'}") == ""

    async def test_a_cancelled_creation_leaves_nothing(self, place: Place) -> None:
        creating = asyncio.create_task(place.kind.create(place.new_id(), place.spec()))
        await asyncio.sleep(0.01)  # the engine was asked, and has not answered
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    async def test_the_users_of_images_own_what_is_made_for_them(self, place: Place) -> None:
        runtime = await place.new(image=OTHER)
        await runtime.put(b"", "/home/agent/.config/tool/settings")
        script = "id -un; touch here ~/there ~/.config/new && rm ~/.config/tool/settings && rmdir ~/.config/tool"
        ran = await place.shell(runtime, script)
        assert (ran.output, ran.code) == ("agent\n", 0)

    async def test_volumes_can_be_read_when_all_is_dead(self, place: Place) -> None:
        runtime = await place.new(image=OTHER)
        await place.shell(runtime, "echo kept > /data/file")
        await runtime.stop()
        await runtime.get("/data/file", place.scratch / "file")
        assert (place.scratch / "file").read_text() == "kept\n"

    async def test_keys_are_not_told_to_the_machine(self, place: Place, engine: str) -> None:
        runtime = await place.new(env={"KEY": "sk-of-the-runtime"})
        running = asyncio.create_task(place.shell(runtime, "touch up; sleep 60", env={"KEY2": "sk-of-the-command"}))
        await place.shell(runtime, WAIT, timeout=30)
        assert "sk-of-the" not in _command_lines() + _call(engine, "inspect", f"polar-{runtime.id}")
        await runtime.stop()
        await running

    async def test_a_full_container_is_not_our_failure(self, place: Place) -> None:
        runtime = await place.new(limits=Limits(processes=20))
        await runtime.run(["sh", "-c", "for i in $(seq 60); do setsid sleep 60 >/dev/null 2>&1 & done"])
        assert (await place.shell(runtime, "echo alive")).output == "alive\n"
        assert (await runtime.run(["sh", "-c", "(true); exit 0"])).exit_code == 2  # can't fork

    async def test_others_containers_are_left_alone(self, place: Place, engine: str) -> None:
        id = place.new_id()
        container = _call(engine, "create", "--name", f"polar-{id}", "--label", "polar.runtime=another", PLAIN, "true")
        try:
            with pytest.raises(SandboxError):
                await place.kind.create(id, place.spec())
            assert await place.kind.sweep() == []
            _call(engine, "inspect", container)
        finally:
            _call(engine, "rm", container)

    async def test_a_container_that_somebody_kills_is_the_platforms_failure(self, place: Place, engine: str) -> None:
        runtime = await place.new()
        running = asyncio.create_task(place.shell(runtime, "touch up; sleep 60"))
        await place.shell(runtime, WAIT, timeout=30)
        _call(engine, "kill", f"polar-{runtime.id}")
        with pytest.raises(SandboxError):
            await running

    async def test_an_image_that_is_nowhere_is_named(self, place: Place) -> None:
        with pytest.raises(SandboxError, match="no-such-image"):
            await place.kind.prepare("localhost:1/no-such-image")
        with pytest.raises(SandboxError, match="needs an image"):
            await place.kind.prepare(None)


def _call(*command: str) -> str:
    return subprocess.check_output(command, text=True).strip()


def _command_lines() -> str:
    """Of everything that runs on the machine."""
    return subprocess.check_output(["ps", "axww", "-o", "args"], text=True)

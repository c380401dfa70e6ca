"""The contract for kinds whose runtimes are containers, and what it asks of these besides."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes import seccomp
from polar.runtimes.base import Limits, Runtime, SandboxError
from polar.runtimes.containers.backend import STATE_LABEL
from polar.runtimes.containers.cli import ContainerCli
from polar.testing import leftovers
from polar.testing.contract import requires
from polar.testing.runtimes import ALL_PROMISES, RuntimeContract, RuntimeFactory
from tests.attack import sandbox_attacks as attacks
from tests.contract.image import OTHER, PLAIN, ensure_image

FILL = "for i in $(seq 60); do setsid sleep 60 >/dev/null 2>&1 & done"
END_ALL = """for p in /proc/[0-9]*; do
  { read -r -d '' _; read -r -d '' seconds; } < $p/cmdline; [ "$seconds" = 86400 ] && kill -9 ${p#/proc/}
done; while :; do :; done"""
WAIT = "until [ -e up ]; do sleep 0.02; done"


class ContainerContract(RuntimeContract):
    promises = ALL_PROMISES - {"disk"}  # but for engines that store on XFS with quotas
    image = PLAIN
    parallel_runtimes = 16
    dies_with_its_node = False  # but with a sweep: the engine knows nothing of the node

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The engine's program, with the images that the tests need."""
        kind = cls.plugin(tmp_path_factory.mktemp("state"), "http://127.0.0.1:9")
        if (why := asyncio.run(kind.check_availability())) is not None:
            pytest.skip(f"no {kind.name} here: {why}")
        for image in (PLAIN, OTHER):
            ensure_image(kind.name, image)
        return str(kind.name)

    @pytest.fixture(autouse=True)
    def no_container_is_left(self, engine: str, tmp_path: Path) -> Iterator[None]:
        yield
        assert _call(engine, "ps", "--all", "--quiet", "--filter", f"label={STATE_LABEL}={tmp_path / 'state'}") == ""

    @pytest.fixture
    def built(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the images that the engine is asked to build."""
        asked: list[str] = []
        call = ContainerCli.call

        async def noting(cli: ContainerCli, *arguments: str, **options: Any) -> str:
            if arguments[0] == "build":
                asked.append(arguments[arguments.index("--tag") + 1])
            return await call(cli, *arguments, **options)

        monkeypatch.setattr(ContainerCli, "call", noting)
        return asked

    async def test_system_calls_are_refused_as_the_table_says(self, runtimes: RuntimeFactory) -> None:
        table = dict(seccomp.list_denied(seccomp.NO_ALLOWANCES, own_users=False))
        numbers = {call.name: getattr(call, str(seccomp.detect_architecture())) for call in table}
        asked = json.dumps([it for it in numbers.items() if it[1] is not None]).encode()
        wanted = {call.name: answer for call, answer in table.items() if numbers[call.name] is not None}

        async def told(runtime: Runtime, program: str) -> dict[str, Any]:
            output = runtimes.scratch / "told"
            done = await runtime.run(["python3", "-c", program], stdin=asked, output=output)
            assert done.exit_code == 0, output.read_text()
            return dict(json.loads(output.read_text()))

        runtime = await runtimes.start_runtime()
        assert (await told(runtime, attacks.CALLS))["answers"] == wanted
        assert await told(runtime, attacks.FAMILIES) == {
            "opened": [],
            "usual": [None] * 5,
            "modules": [],
            "netlink": [],
        }
        assert await told(runtime, attacks.NAMESPACES) == {"clone3": 38, "unshare": [], "clone": [], "setns": []}
        other = await runtimes.start_runtime(seccomp=("keyctl",))
        answers = (await told(other, attacks.CALLS))["answers"]
        assert {name for name in answers if answers[name] != wanted[name]} == {"keyctl"}

    async def test_a_cancelled_creation_leaves_nothing(self, runtimes: RuntimeFactory) -> None:
        creating = asyncio.create_task(runtimes.backend.create(runtimes.new_id(), runtimes.make_spec()))
        await asyncio.sleep(0.01)  # the engine was asked, and has not answered
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    async def test_the_users_of_images_own_what_is_made_for_them(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(image=OTHER)
        await runtime.put(b"", "/home/agent/.config/tool/settings")
        script = "id -un; touch here ~/there ~/.config/new && rm ~/.config/tool/settings && rmdir ~/.config/tool"
        ran = await runtimes.run_script(runtime, script)
        assert (ran.output, ran.exit_code) == ("agent\n", 0)

    async def test_the_users_of_images_own_what_is_put_when_all_is_dead(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(image=OTHER)
        before = await runtimes.run_script(runtime, "stat -c %u:%g / /etc /etc/passwd")
        await runtime.stop()
        source = runtimes.scratch / "source"
        (source / "etc").mkdir(parents=True)
        (source / "etc/new").write_text("")
        (source / "link").symlink_to("etc/new")
        await runtime.put(source, "/")
        await runtime.put(b"", "/home/agent/.config/tool/settings")
        await runtime.restart()
        assert (await runtimes.run_script(runtime, "stat -c %u:%g / /etc /etc/passwd")).output == before.output
        made = "/etc/new /link ~/.config ~/.config/tool ~/.config/tool/settings"
        assert set((await runtimes.run_script(runtime, f"stat -c %u:%g {made}")).output.split()) == {"1000:1000"}

    async def test_volumes_can_be_read_when_all_is_dead(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(image=OTHER)
        await runtimes.run_script(runtime, "echo kept > /data/file")
        await runtime.stop()
        await runtime.get("/data/file", runtimes.scratch / "file")
        assert (runtimes.scratch / "file").read_text() == "kept\n"

    async def test_keys_are_not_told_to_the_machine(self, runtimes: RuntimeFactory, engine: str) -> None:
        runtime = await runtimes.start_runtime(env={"KEY": "sk-of-the-runtime"})
        running = asyncio.create_task(
            runtimes.run_script(runtime, "touch up; sleep 60", env={"KEY2": "sk-of-the-command"})
        )
        await runtimes.run_script(runtime, WAIT, timeout=30)
        assert "sk-of-the" not in _command_lines() + _call(engine, "inspect", f"polar-{runtime.id}")
        await runtime.stop()
        await running

    @requires("processes")
    async def test_a_full_container_is_not_our_failure(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(processes=20))
        await runtime.run(["sh", "-c", FILL])
        assert (await runtimes.run_script(runtime, "echo alive")).output == "alive\n"
        assert (await runtime.run(["sh", "-c", "(true); exit 0"])).exit_code == 2  # can't fork

    async def test_others_containers_are_left_alone(self, runtimes: RuntimeFactory, engine: str) -> None:
        id = runtimes.new_id()
        container = _call(engine, "create", "--name", f"polar-{id}", "--label", "polar.runtime=another", PLAIN, "true")
        try:
            with pytest.raises(SandboxError):
                await runtimes.backend.create(id, runtimes.make_spec())
            assert await runtimes.backend.sweep() == []
            _call(engine, "inspect", container)
        finally:
            _call(engine, "rm", container)

    @requires("processes")
    async def test_a_container_that_what_runs_inside_has_ended_is_not_our_failure(
        self, runtimes: RuntimeFactory
    ) -> None:
        """The first process can't start its sleep again: no process is left to it."""
        runtime = await runtimes.start_runtime(limits=Limits(processes=20))
        await runtime.run(["sh", "-c", f"touch up; {FILL}"])
        others = [asyncio.create_task(runtimes.run_script(runtime, f": > up{i}; exec sleep 60")) for i in range(2)]
        await runtimes.run_script(runtime, "until [ -e up0 -a -e up1 ]; do :; done", timeout=30)
        for script in (END_ALL, "echo alive"):
            assert (await runtimes.run_script(runtime, script, timeout=30)).exit_code == 137
        assert [ran.exit_code for ran in await asyncio.gather(*others)] == [137, 137]
        await runtime.stop()
        await runtime.get("/workspace/up", runtimes.scratch / "up")

    async def test_a_container_that_somebody_removes_is_the_platforms_failure(
        self, runtimes: RuntimeFactory, engine: str
    ) -> None:
        runtime = await runtimes.start_runtime()
        running = asyncio.create_task(runtimes.run_script(runtime, "touch up; sleep 60"))
        await runtimes.run_script(runtime, WAIT, timeout=30)
        _call(engine, "rm", "--force", f"polar-{runtime.id}")
        with pytest.raises(SandboxError):
            await running

    async def test_an_image_is_built_from_a_folder_once_for_each_content(
        self, runtimes: RuntimeFactory, engine: str, built: list[str]
    ) -> None:
        folder = runtimes.scratch / "environment"
        (folder / "data").mkdir(parents=True)
        lines = (f"FROM {PLAIN}", "COPY data /data", f"RUN echo {runtimes.mark} > /made", "USER agent")
        (folder / "Dockerfile").write_text("\n".join(lines))
        (folder / "data/file").write_text("one")
        image = f"build:{folder}"
        one, other = await asyncio.gather(runtimes.start_runtime(image=image), runtimes.start_runtime(image=image))
        for runtime in (one, other):
            ran = await runtimes.run_script(runtime, "cat /made /data/file; id -un; touch here")
            assert (ran.output, ran.exit_code) == (f"{runtimes.mark}\noneagent\n", 0)
        assert len(built) == 1
        elsewhere = runtimes.scratch / "elsewhere"
        shutil.copytree(folder, elsewhere)
        await runtimes.backend.prepare(f"build:{elsewhere}")
        assert len(built) == 1
        (elsewhere / "data/file").write_text("two")
        assert (
            await runtimes.run_script(await runtimes.start_runtime(image=f"build:{elsewhere}"), "cat /data/file")
        ).output == "two"
        assert len(built) == 2
        await runtimes.backend.close()
        for name in built:
            _call(engine, "rmi", "--force", name)

    async def test_a_build_that_fails_says_what_it_printed(self, runtimes: RuntimeFactory, engine: str) -> None:
        folder = runtimes.scratch / "environment"
        folder.mkdir()
        with pytest.raises(SandboxError, match="Dockerfile"):
            await runtimes.backend.prepare(f"build:{folder}")
        (folder / "Dockerfile").write_text(f"FROM {PLAIN}\nRUN echo so it is {runtimes.mark}; exit 3\n")
        for _ in range(2):
            with pytest.raises(SandboxError, match=r"(?s)can't be built.*so it is.*3"):
                await runtimes.backend.prepare(f"build:{folder}")
        assert runtimes.mark not in _call(engine, "ps", "--all", "--no-trunc", "--format", "{{.Command}}")
        (folder / "Dockerfile").write_text("FROM localhost:1/no-such-image\n")
        with pytest.raises(SandboxError, match="no-such-image"):
            await runtimes.backend.prepare(f"build:{folder}")

    async def test_a_build_ends_with_its_kind(self, runtimes: RuntimeFactory) -> None:
        folder = runtimes.scratch / "environment"
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {PLAIN}\nRUN MARK={runtimes.mark} sleep 300\n")
        preparing = asyncio.create_task(runtimes.backend.prepare(f"build:{folder}"))
        while not preparing.done() and "sleep" not in "".join(leftovers.list_processes(runtimes.mark)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await runtimes.backend.close()
        with pytest.raises(asyncio.CancelledError):
            await preparing

    async def test_an_image_that_is_nowhere_is_named(self, runtimes: RuntimeFactory) -> None:
        with pytest.raises(SandboxError, match="no-such-image"):
            await runtimes.backend.prepare("localhost:1/no-such-image")
        with pytest.raises(SandboxError, match="needs an image"):
            await runtimes.backend.prepare(None)


def _call(*command: str) -> str:
    return subprocess.check_output(command, text=True).strip()


def _command_lines() -> str:
    """Of everything that runs on the machine."""
    return subprocess.check_output(["ps", "axww", "-o", "args"], text=True)

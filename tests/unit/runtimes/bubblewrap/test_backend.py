"""What is `bubblewrap`'s own: other roots, machines without cgroups, a gateway on a Unix socket, failures to start."""

import asyncio
import resource
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtimes.base import CorruptedRuntimeError, Limits, Runtime, RuntimeSpec, SandboxError
from polar.runtimes.bubblewrap import Bubblewrap
from polar.runtimes.cgroups import CgroupHierarchies
from polar.testing import leftovers

pytestmark = pytest.mark.runtimes

PROGRAMS = ("sh", "cat", "sleep", "ls", "touch")


@pytest.fixture
async def kind(tmp_path: Path) -> AsyncIterator[Bubblewrap]:
    kind = Bubblewrap(tmp_path / "state", f"unix:{tmp_path / 'gateway'}")
    if (why := await kind.check_availability()) is not None:
        pytest.skip(f"no bubblewrap here: {why}")
    yield kind
    await kind.close()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root of its own, with a shell and little else."""
    root = tmp_path / "image"
    for name in ("usr/bin", "etc", "tmp", "data"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "data/file").write_text("of the image")
    for program in PROGRAMS:
        path = shutil.which(program)
        assert path is not None
        shutil.copy(path, root / "usr/bin" / program)
        for line in subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout.splitlines():
            for library in (Path(word) for word in line.split() if word.startswith("/")):
                target = root / str(library).lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, target)
    return root


async def test_an_unpacked_image_is_shared_and_not_changed(kind: Bubblewrap, image: Path, tmp_path: Path) -> None:
    one, other = [await kind.create(id, RuntimeSpec(image=str(image))) for id in ("one", "other")]
    await asyncio.gather(one.start(), other.start())
    output = tmp_path / "output"
    script = "cat /data/file; echo changed > /data/file; touch /usr/bin/new; cat /data/file; ls /"
    assert (await one.run(["sh", "-c", script], output=output)).exit_code == 0
    assert output.read_text().startswith("of the imagechanged\n")
    assert {"workspace", "data", "home"} <= set(output.read_text().split())
    await other.run(["cat", "/data/file"], output=output)
    assert output.read_text() == "of the image"
    assert (image / "data/file").read_text() == "of the image"
    assert not (image / "usr/bin/new").exists()
    await one.stop()
    await one.get("/data", tmp_path / "data")
    assert (tmp_path / "data/file").read_text() == "changed\n"


async def test_an_image_that_is_none_says_so(kind: Bubblewrap, tmp_path: Path) -> None:
    for image in ("python:3.12", str(tmp_path)):
        with pytest.raises(SandboxError, match="unpacked root"):
            await kind.prepare(image)


async def test_without_cgroups_a_time_out_kills_all_that_is_inside(kind: Bubblewrap, tmp_path: Path) -> None:
    await kind.prepare(None)
    kind._cgroups = CgroupHierarchies(None, frozenset(), {})
    runtime = await kind.create("id", RuntimeSpec(env={"MARK": str(tmp_path)}, limits=Limits(memory_mb=64)))
    await runtime.start()
    completed = await runtime.run(["sh", "-c", "(setsid sleep 60 &); sleep 60"], timeout=0.2)
    assert (completed.timed_out, completed.exit_code) == (True, None)
    assert not any("sleep" in line for line in leftovers.list_processes(str(tmp_path)))
    assert (await runtime.run(["true"])).exit_code == 0
    await runtime.remove()
    assert not any("sleep" in line for line in leftovers.list_processes(str(tmp_path)))


async def test_the_gateway_may_be_a_unix_socket(kind: Bubblewrap, tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    output = tmp_path / "output"
    async with await asyncio.start_unix_server(greet, tmp_path / "gateway"):
        for network in ("gateway", "internet"):
            runtime = await kind.create(network, RuntimeSpec(network=network))
            await runtime.start()
            host, _, port = runtime.gateway_url().removeprefix("http://").rpartition(":")
            await runtime.run(["bash", "-c", f"cat < /dev/tcp/{host}/{port}"], output=output)
            assert output.read_text() == "hello"
            await runtime.remove()


async def test_a_start_that_is_broken_off_leaves_nothing(kind: Bubblewrap, tmp_path: Path) -> None:
    await kind.prepare(None)
    for number, after in enumerate((0.0, 0.002, 0.005, 0.01, 0.02)):
        runtime = await kind.create(f"broken{number}", RuntimeSpec(limits=Limits(disk_mb=16)))
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(after)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(runtime.remove(), runtime.remove(), runtime.stop())
    assert list((tmp_path / "state").rglob("broken*")) == []


async def test_two_hundred_at_once(kind: Bubblewrap, tmp_path: Path) -> None:
    """Each with a command that runs and a daemon, and files for their output."""
    script = "echo $0; (setsid sleep 300 &); until [ -e go ]; do sleep 0.2; done; exit 7"
    mark, ids = f"many-{secrets.token_hex(8)}", [f"m{secrets.token_hex(8)}" for _ in range(200)]
    launching = asyncio.Semaphore(8)

    async def launched(id: str) -> Runtime:
        async with launching:
            runtime = await kind.create(id, RuntimeSpec(env={"MARK": mark}, limits=Limits(1.0, 256, 64)))
            await runtime.start()
            return runtime

    runtimes = await asyncio.gather(*(launched(id) for id in ids))
    commands = [asyncio.create_task(it.run(["sh", "-c", script, it.id], output=tmp_path / it.id)) for it in runtimes]
    async with asyncio.timeout(120):
        while not all((tmp_path / id).exists() and (tmp_path / id).read_text() == f"{id}\n" for id in ids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.gather(*(runtime.put(b"", "/workspace/go") for runtime in runtimes))
    assert [completed.exit_code for completed in await asyncio.gather(*commands)] == [7] * 200
    assert len(leftovers.list_processes(mark, children=False)) >= 200  # the daemons
    await asyncio.gather(*(runtime.remove() for runtime in runtimes))
    assert leftovers.list_processes(mark, children=False) == []
    found = leftovers.list_leftovers(tmp_path / "state", ids, mark)
    assert [what for what, names in found.items() if names and what != "processes"] == []


async def test_what_an_image_lacks_is_told_at_once(kind: Bubblewrap, image: Path) -> None:
    (image / "usr/bin/cat").unlink()
    runtime = await kind.create("id", RuntimeSpec(image=str(image)))
    with pytest.raises(SandboxError, match="cat"):
        await asyncio.wait_for(runtime.start(), 30)


async def test_too_few_descriptors_are_the_platforms_failure(kind: Bubblewrap) -> None:
    await kind.prepare(None)
    runtime = await kind.create("id", RuntimeSpec())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (leftovers.count_open_descriptors() + 3, hard))
    try:
        with pytest.raises(SandboxError, match="Too many open files"):
            await runtime.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await runtime.remove()


async def test_an_id_is_used_once(kind: Bubblewrap) -> None:
    await kind.create("id", RuntimeSpec())
    with pytest.raises(SandboxError, match="already"):
        await kind.create("id", RuntimeSpec())


async def test_without_the_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    why = await Bubblewrap(tmp_path / "state", "http://127.0.0.1:9").check_availability()
    assert why is not None
    assert "install the package bubblewrap" in why


async def test_a_bad_image_spoils_nothing(kind: Bubblewrap) -> None:
    with pytest.raises(SandboxError):
        await kind.prepare("python:3.12")
    runtime = await kind.create("id", RuntimeSpec())
    await runtime.start()
    assert (await runtime.run(["true"])).exit_code == 0


async def test_what_is_written_to_the_first_process_does_not_end_it(kind: Bubblewrap, tmp_path: Path) -> None:
    runtime = await kind.create("id", RuntimeSpec())
    await runtime.start()
    for _ in range(2):
        await runtime.run(["sh", "-c", "for i in 1 2 3; do echo x > /proc/1/fd/0; sleep 0.1; done"])
    assert (await runtime.run(["echo", "alive"], output=tmp_path / "output")).exit_code == 0
    assert (tmp_path / "output").read_text() == "alive\n"


END = """import ctypes, os, signal
PTRACE_SEIZE, PTRACE_O_EXITKILL = 0x4206, 0x100000
if os.fork() == 0:
    os._exit(ctypes.CDLL(None).ptrace(PTRACE_SEIZE, 1, None, ctypes.c_void_p(PTRACE_O_EXITKILL)))
signal.pause()
"""


async def test_whoever_ends_the_first_process_from_inside_is_killed_by_that(kind: Bubblewrap) -> None:
    runtime = await kind.create("id", RuntimeSpec())
    await runtime.start()
    assert (await runtime.run(["/usr/bin/python3", "-c", END], timeout=60)).exit_code == 137
    assert (await runtime.run(["true"])).exit_code == 137
    await runtime.stop()
    await runtime.restart()
    assert (await runtime.run(["true"])).exit_code == 0


async def test_a_sandbox_that_dies_with_the_spawner_is_the_platforms_failure(kind: Bubblewrap) -> None:
    runtime = await kind.create("id", RuntimeSpec())
    await runtime.start()
    assert kind.spawner.process is not None
    kind.spawner.process.kill()
    for _ in range(2):
        with pytest.raises(SandboxError):
            await runtime.run(["true"])


async def test_silence_at_a_restart_is_whose_program_is_silent(kind: Bubblewrap, image: Path) -> None:
    """Replaced by what ran inside, or by somebody outside."""
    one, other = [await kind.create(id, RuntimeSpec(image=str(image))) for id in ("one", "other")]
    await asyncio.gather(one.start(), other.start())
    await one.put(image / "usr/bin/ls", "/usr/bin/cat")
    await asyncio.gather(one.stop(), other.stop())
    with pytest.raises(CorruptedRuntimeError):
        await one.restart()
    shutil.copy(image / "usr/bin/ls", image / "usr/bin/cat")
    with pytest.raises(SandboxError):
        await other.restart()

"""The contract of every runtime backend:

    class TestMine(RuntimeContract):
        plugin = Mine
        promises = ALL_PROMISES

`promises` names what a backend keeps of what not every one can; there are no tests of the rest. Each test
ends with a look at the machine: no process, mount, cgroup, loop device, descriptor or folder may be left. The tests
need bash and the usual small programs in the runtime.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import pytest_asyncio

from polar.runtimes.base import (
    CommandResult,
    CorruptedRuntimeError,
    Limits,
    Mount,
    Runtime,
    RuntimeBackend,
    RuntimeSpec,
    SandboxError,
    TransferTooLargeError,
)
from polar.testing import killed_node, leftovers
from polar.testing.contract import Contract, assert_helpful, requires

Promise = Literal["root", "network", "cpu", "memory", "processes", "disk"]
ALL_PROMISES: frozenset[Promise] = frozenset({"root", "network", "cpu", "memory", "processes", "disk"})

GREETING_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
REQUEST_SCRIPT = """exec 3<>/dev/tcp/{host}/{port} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"""
EXHAUST_MEMORY_SCRIPT = "head -c 300000000 /dev/zero | tail -n 1 > /dev/null; exit ${PIPESTATUS[1]}"
_SETTLE_SECONDS = 10.0


class CommandRun:
    """How a command ended, and what it wrote."""

    def __init__(self, completed: CommandResult, output: str) -> None:
        self.completed = completed
        self.output = output

    @property
    def exit_code(self) -> int | None:
        return self.completed.exit_code


class RuntimeFactory:
    """Makes runtimes of one backend, with a mark on all that runs in them."""

    def __init__(self, backend: RuntimeBackend, image: str | None, state: Path, gateway: str, scratch: Path) -> None:
        self.backend = backend
        self.image = image
        self.state = state
        self.gateway = gateway
        self.scratch = scratch
        self.mark = f"polar-contract-{secrets.token_hex(8)}"
        self.ids: list[str] = []

    def make_spec(self, **changes: Any) -> RuntimeSpec:
        return RuntimeSpec(**{"image": self.image, **changes, "env": {"MARK": self.mark, **changes.get("env", {})}})

    def new_id(self) -> str:
        self.ids.append(f"t{secrets.token_hex(8)}")
        return self.ids[-1]

    async def start_runtime(self, **changes: Any) -> Runtime:
        runtime = await self.backend.create(self.new_id(), self.make_spec(**changes))
        await runtime.start()
        return runtime

    async def run_script(self, runtime: Runtime, script: str, **options: Any) -> CommandRun:
        output = self.scratch / secrets.token_hex(8)
        completed = await runtime.run(["bash", "-c", script], output=output, **options)
        return CommandRun(completed, output.read_text(errors="replace"))

    async def find_leftovers(self) -> dict[str, list[str]]:
        """What is left once it has had a moment: the kernel takes mounts and devices down behind a process's end."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            found = leftovers.list_leftovers(self.state, self.ids, self.mark)
            if not any(found.values()) or time.monotonic() > deadline:
                return {what: names for what, names in found.items() if names}
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serve_greetings() -> AsyncIterator[str]:
    """In the gateway's place: greets whoever comes."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GREETING_RESPONSE)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class RuntimeContract(Contract):
    kind = "runtimes"
    promises: ClassVar[frozenset[Promise]]
    image: ClassVar[str | None] = None
    parallel_runtimes: ClassVar[int] = 32  # runtimes at the same time
    dies_with_its_node: ClassVar[bool] = True  # without a sweep; what is on disk is left to that

    @pytest_asyncio.fixture
    async def runtimes(self, tmp_path: Path) -> AsyncIterator[RuntimeFactory]:
        async with serve_greetings() as url:
            state, scratch = tmp_path / "state", tmp_path / "scratch"
            scratch.mkdir()
            backend: RuntimeBackend = self.plugin(state, url)
            if (why := await backend.check_availability()) is not None:
                await backend.close()
                pytest.skip(f"no {backend.name} here: {why}")
            await backend.prepare(self.image)
            runtimes = RuntimeFactory(backend, self.image, state, url, scratch)
            before = leftovers.count_open_descriptors()
            try:
                yield runtimes
            finally:
                await backend.close()
            assert await runtimes.find_leftovers() == {}
            assert leftovers.count_open_descriptors() <= before

    @classmethod
    def has_capability(cls, name: str) -> bool:
        return name in cls.promises

    # Commands

    async def test_a_command_has_its_environment_folder_input_output_and_code(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(env={"A": "of the runtime", "B": "of the runtime"})
        script = 'echo "$A, $B"; pwd; echo "$HOME"; cat; echo error >&2; exit 3'
        ran = await runtimes.run_script(runtime, script, env={"B": "of the command"}, stdin=b"input\n")
        workdir, home = runtime.path("/workspace"), runtime.path("/home/agent")
        assert ran.output == f"of the runtime, of the command\n{workdir}\n{home}\ninput\nerror\n"
        assert ran.exit_code == 3
        assert not ran.completed.timed_out
        assert (await runtimes.run_script(runtime, "pwd", cwd="/tmp")).output == f"{runtime.path('/tmp')}\n"

    async def test_a_command_has_no_descriptors_but_its_three(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        output = runtimes.scratch / "descriptors"
        await runtime.run(["ls", "-l", "/proc/self/fd"], output=output)
        found = [line.partition("->")[0].split()[-1] for line in output.read_text().splitlines() if "->" in line]
        assert found == ["0", "1", "2", "3"]  # the last is the listing's own

    async def test_codes_are_those_of_a_shell(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        assert (await runtime.run(["true"])).exit_code == 0
        assert (await runtime.run(["no-such-program"])).exit_code == 127
        assert (await runtime.run(["sh", "-c", "kill -TERM $$"])).exit_code == 128 + signal.SIGTERM
        assert (await runtime.run(["sh", "-c", "kill -KILL $$"])).exit_code == 128 + signal.SIGKILL

    async def test_nothing_of_the_nodes_environment_is_seen(
        self, runtimes: RuntimeFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NODE_SECRET", "hunter2")
        runtime = await runtimes.start_runtime()
        ran = await runtimes.run_script(runtime, "env; echo $PPID")
        assert "hunter2" not in ran.output
        if "root" in self.promises:
            seen = await runtimes.run_script(runtime, "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'")
            assert "hunter2" not in seen.output
            assert str(runtimes.mark) in seen.output  # one's own can be read

    async def test_arguments_and_input_may_be_large(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        text = "x" * 100_000
        ran = await runtimes.run_script(runtime, "cat; echo -n $BIG", stdin=b"y" * 3_000_000, env={"BIG": text})
        assert ran.output == "y" * 3_000_000 + text

    async def test_output_comes_as_it_is_written(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        output = runtimes.scratch / "output"
        script = f"echo first; until [ -e {runtime.path('/workspace/go')} ]; do sleep 0.02; done; echo second"
        running = asyncio.create_task(runtime.run(["sh", "-c", script], output=output, timeout=30))
        while not output.exists() or output.read_text() != "first\n":  # noqa: ASYNC110  a file tells nobody
            await asyncio.sleep(0.01)
        await runtime.put(b"", "/workspace/go")
        assert (await running).exit_code == 0
        assert output.read_text() == "first\nsecond\n"

    async def test_output_is_cut_and_the_command_goes_on(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        ran = await runtimes.run_script(runtime, "head -c 1000000 /dev/zero; exit 4", max_output=1000)
        assert (len(ran.output), ran.exit_code, ran.completed.output_truncated) == (1000, 4, True)
        whole = await runtimes.run_script(runtime, "head -c 1000 /dev/zero", max_output=1000)
        assert (len(whole.output), whole.completed.output_truncated) == (1000, False)

    async def test_a_daemon_that_keeps_the_output_open_is_not_waited_for(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        ran = await runtimes.run_script(runtime, "setsid sleep 60 & echo done", timeout=30)
        assert (ran.output, ran.exit_code) == ("done\n", 0)

    async def test_commands_run_side_by_side(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        runs = await asyncio.gather(
            *(runtimes.run_script(runtime, f"echo {index}; exit {index}") for index in range(8))
        )
        assert [(run.output, run.exit_code) for run in runs] == [(f"{index}\n", index) for index in range(8)]

    # Death

    @pytest.mark.parametrize(
        "script",
        [
            "sleep 60",
            "trap '' TERM INT HUP; while :; do sleep 1; done",
            "setsid sleep 60 & sleep 60",
            "(setsid sh -c 'trap \"\" TERM; (sleep 60 &) ; sleep 60' &) ; sleep 60",
            "(setsid nohup sh -c 'while :; do setsid sleep 0.01 & sleep 0.005; done' >/dev/null 2>&1 &) ; sleep 60",
        ],
        ids=["plain", "ignores-sigterm", "setsid", "double-fork", "respawns"],
    )
    async def test_a_time_out_kills_all_that_the_command_started(self, runtimes: RuntimeFactory, script: str) -> None:
        runtime = await runtimes.start_runtime()
        before = leftovers.list_processes(runtimes.mark)
        ran = await runtimes.run_script(runtime, f"echo started; {script}", timeout=0.3)
        assert (ran.exit_code, ran.completed.timed_out, ran.output) == (None, True, "started\n")
        after = leftovers.list_processes(runtimes.mark)
        assert [line for line in after if line not in before and "spawner" not in line] == []
        assert (await runtimes.run_script(runtime, "echo alive")).output == "alive\n"

    async def test_a_cancelled_call_kills_its_command(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        running = asyncio.create_task(runtimes.run_script(runtime, "setsid sleep 60 & sleep 60"))
        await asyncio.sleep(0.3)
        assert any("sleep 60" in line for line in leftovers.list_processes(runtimes.mark))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not any("sleep 60" in line for line in leftovers.list_processes(runtimes.mark))

    async def test_stop_ends_what_runs_and_files_can_still_be_taken(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(
            runtime, "echo kept > result; setsid sh -c 'while :; do date >> late; sleep 0.01; done' &"
        )
        running = asyncio.create_task(runtimes.run_script(runtime, "sleep 60"))
        await asyncio.sleep(0.2)
        await runtime.stop()
        assert (await running).exit_code is None
        await runtime.get("/workspace", runtimes.scratch / "once")
        await asyncio.sleep(0.1)
        await runtime.get("/workspace", runtimes.scratch / "again")
        assert (runtimes.scratch / "once/result").read_text() == "kept\n"
        assert (runtimes.scratch / "once/late").read_bytes() == (runtimes.scratch / "again/late").read_bytes()
        with pytest.raises(SandboxError) as error:
            await runtime.run(["true"])
        assert_helpful(error.value)

    async def test_files_can_be_put_when_all_is_dead(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtime.stop()
        await runtime.put(b"late", "/workspace/new/file")
        await runtime.get("/workspace/new/file", runtimes.scratch / "file")
        assert (runtimes.scratch / "file").read_text() == "late"

    async def test_removal_may_come_at_any_time_and_again(self, runtimes: RuntimeFactory) -> None:
        for started in (False, True):
            runtime = await runtimes.backend.create(runtimes.new_id(), runtimes.make_spec())
            if started:
                await runtime.start()
                running = asyncio.create_task(runtime.run(["sleep", "60"]))
                await asyncio.sleep(0.2)
            await runtime.remove()
            await runtime.remove()
        assert (await running).exit_code is None
        assert not any("sleep 60" in line for line in leftovers.list_processes(runtimes.mark))
        assert not leftovers.list_leftovers(runtimes.state, runtimes.ids, runtimes.mark)["folders"]
        await runtime.stop()

    # Lists

    async def test_entries_are_listed_and_deleted_from_outside(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(
            runtime,
            "mkdir -p a/b out; echo hello > a/b/c; ln -s b a/link; ln -s a/b up; mkfifo pipe; touch $'\\xff' out/x",
        )
        found = await runtime.list_entries("/workspace", exclude=["/workspace/out"])
        kinds = {path.removeprefix("/workspace"): state.kind for path, state in found.items()}
        folders = dict.fromkeys(("", "/a", "/a/b"), "folder")
        assert kinds == {**folders, "/a/b/c": "file", "/a/link": "link", "/up": "link", "/\udcff": "file"}
        assert (found["/workspace/up"].target, found["/workspace/a/b/c"].size) == ("a/b", 6)
        again = await runtime.list_entries("/workspace", exclude=["/workspace/out"])
        assert again == found
        await runtimes.run_script(runtime, "touch -r a/b/c stamp; echo HELLO > a/b/c; touch -r stamp a/b/c")
        changed = await runtime.list_entries("/workspace/a")
        assert changed["/workspace/a/b/c"].modified_ns == found["/workspace/a/b/c"].modified_ns
        assert changed["/workspace/a/b/c"] != found["/workspace/a/b/c"]
        await runtime.stop()
        assert await runtime.list_entries("/workspace/nothing") == {}
        await runtime.delete(
            [f"/workspace/{name}" for name in ("up", "a/link", "nothing/here", "out", "\udcff", "pipe")]
        )
        left = {"", "/a", "/a/b", "/a/b/c", "/stamp"}
        assert {path.removeprefix("/workspace") for path in await runtime.list_entries("/workspace")} == left

    # Again

    async def test_restarted_it_has_its_files_and_no_process_from_before(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(runtime, "echo kept > file; (setsid sh -c 'trap \"\" TERM; sleep 300' &)")
        running = asyncio.create_task(runtimes.run_script(runtime, "echo one > started; sleep 300"))
        while (await runtimes.run_script(runtime, "cat started")).output != "one\n":
            pass
        await runtime.stop()
        assert (await running).exit_code is None
        for turn in range(2):
            await runtime.restart()
            assert [line for line in leftovers.list_processes(runtimes.mark) if "sleep" in line] == []
            ran = await runtimes.run_script(runtime, "cat file; echo kept > file; ls; (setsid sleep 300 &)")
            assert (ran.output, ran.exit_code) == ("kept\nfile\n" + turn * "new\n" + "started\n", 0)
            await runtime.put(b"put", "/workspace/new")
            await runtime.get("/workspace/new", runtimes.scratch / "new")
            assert (runtimes.scratch / "new").read_bytes() == b"put"
            await runtime.stop()
            with pytest.raises(SandboxError):
                await runtime.run(["true"])
            await runtime.get("/workspace/file", runtimes.scratch / "file")
            assert (runtimes.scratch / "file").read_text() == "kept\n"
        await runtime.remove()

    async def test_only_what_was_started_and_is_stopped_can_be_restarted(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.backend.create(runtimes.new_id(), runtimes.make_spec())
        with pytest.raises(SandboxError, match="restarted"):
            await runtime.restart()
        await runtime.start()
        with pytest.raises(SandboxError, match="restarted"):
            await runtime.restart()
        assert (await runtime.run(["true"])).exit_code == 0
        await runtime.stop()
        await runtime.remove()
        with pytest.raises(SandboxError, match="restarted"):
            await runtime.restart()
        never = await runtimes.backend.create(runtimes.new_id(), runtimes.make_spec())
        await never.stop()
        with pytest.raises(SandboxError, match="restarted"):
            await never.restart()

    @requires("network")
    async def test_restarted_it_reaches_the_gateway(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtime.stop()
        await runtime.restart()
        host, _, port = runtime.gateway_url().removeprefix("http://").rpartition(":")
        assert (await runtimes.run_script(runtime, REQUEST_SCRIPT.format(host=host, port=port))).output.endswith(
            "hello"
        )

    @requires("memory", "processes")
    async def test_restarted_it_has_its_limits(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(memory_mb=64, processes=20))
        await runtime.stop()
        await runtime.restart()
        ran = await runtimes.run_script(runtime, EXHAUST_MEMORY_SCRIPT)
        assert ran.completed.out_of_memory
        ran = await runtimes.run_script(runtime, "for i in $(seq 60); do sleep 60 & echo $i; done", timeout=2)
        assert 0 < len([line for line in ran.output.splitlines() if line.isdigit()]) <= 20

    @requires("disk")
    async def test_a_full_disk_does_not_prevent_a_restart(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(disk_mb=32))
        await runtimes.run_script(
            runtime, "echo kept > first; cat /dev/zero > big; for i in $(seq 20000); do : > f$i; done"
        )
        await runtime.stop()
        await runtime.restart()
        ran = await runtimes.run_script(
            runtime, "cat first; echo more > another || echo full; rm big f*; echo more > another"
        )
        assert ran.output.startswith("kept\n")
        assert "full\n" in ran.output
        assert ran.exit_code == 0

    @requires("root")
    async def test_links_that_it_left_lead_nowhere_at_a_restart(self, runtimes: RuntimeFactory) -> None:
        """What a start makes or mounts over are folders of the runtime, whatever is in their place by then."""
        outside = runtimes.scratch / "outside"
        outside.mkdir()
        shared = runtimes.scratch / "shared"
        shared.mkdir()
        (shared / "tool").write_text("of the machine")
        mounts = (Mount(shared, "/opt/below/shared"), Mount(shared / "tool", "/srv/tool"))
        script = "cd /; for i in home workspace opt/below srv; do mv $i /tmp/ || rm -r $i; ln -s {way} $i; done"
        for way in (f"{'../' * 30}{str(outside).lstrip('/')}", str(outside), f"/oldroot{outside}"):
            runtime = await runtimes.start_runtime(mounts=mounts)
            await runtimes.run_script(runtime, script.format(way=way))
            await runtime.stop()
            with contextlib.suppress(CorruptedRuntimeError):  # an engine may well refuse
                await runtime.restart()
                ran = await runtimes.run_script(runtime, "cat /opt/below/shared/tool", cwd="/")
                assert ran.output in ("of the machine", "cat: /opt/below/shared/tool: No such file or directory\n")
            assert os.listdir(outside) == []

    @requires("root")
    async def test_what_can_not_be_started_any_more_says_that_it_is_spoiled(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(runtime, "cd /; rm -rf /bin/sh /bin/cat /lib64 /lib; rm -rf /usr/lib64 /usr/bin/sh")
        await runtime.stop()
        with pytest.raises(CorruptedRuntimeError):
            await runtime.restart()
        await runtime.remove()

    # Files

    async def test_files_go_in_and_come_out(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        source = runtimes.scratch / "source"
        (source / "below/deeper").mkdir(parents=True)
        (source / "below/run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "below/run.sh").chmod(0o755)
        (source / "below/deeper/data").write_bytes(bytes(range(256)) * 1000)
        (source / "link").symlink_to("below/run.sh")
        await runtime.put(source, "/workspace/new/folder")
        await runtime.put(b"bytes", "/workspace/new/file")
        ran = await runtimes.run_script(runtime, "new/folder/link; cat new/file; echo; readlink new/folder/link")
        assert ran.output == "ran\nbytes\nbelow/run.sh\n"
        await runtime.get("/workspace/new", runtimes.scratch / "back")
        back = runtimes.scratch / "back"
        assert (back / "folder/below/deeper/data").read_bytes() == bytes(range(256)) * 1000
        assert os.access(back / "folder/below/run.sh", os.X_OK)
        assert os.readlink(back / "folder/link") == "below/run.sh"
        await runtime.get("/workspace/new/file", runtimes.scratch / "file")
        assert (runtimes.scratch / "file").read_bytes() == b"bytes"
        with pytest.raises(FileNotFoundError):
            await runtime.get("/workspace/none", runtimes.scratch / "none")

    async def test_what_is_in_the_way_of_a_file_is_replaced(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        script = "mkdir -p file/below; touch file/below/x; echo old > folder; ln -s /etc/passwd link; mkfifo pipe"
        await runtimes.run_script(runtime, script)
        for inside in ("file", "folder/new", "link", "pipe"):
            await runtime.put(b"new", f"/workspace/{inside}")
            assert (await runtimes.run_script(runtime, f"cat {inside}")).output == "new"

    async def test_links_are_not_followed(self, runtimes: RuntimeFactory) -> None:
        secret = runtimes.scratch / "secret"
        secret.mkdir()
        (secret / "key").write_text("hunter2")
        runtime = await runtimes.start_runtime()
        script = f"""
            mkdir -p out/below && cd out && echo mine > file && mkfifo pipe
            ln -s {secret}/key absolute; ln -s {secret} folder; ln -s /etc passwords
            ln -s {"../" * 30}{str(secret).lstrip("/")}/key relative
            ln -s below/../../../x sly; ln -s file good; ln -s ../file below/up; ln -s . self
            ln -s {secret}/key ../out-link
        """
        await runtimes.run_script(runtime, script)
        await runtime.get("/workspace/out", runtimes.scratch / "out")
        out = runtimes.scratch / "out"
        assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
            "below",
            "below/up",
            "file",
            "good",
            "self",
        ]
        assert os.readlink(out / "below/up") == "../file"
        with pytest.raises(FileNotFoundError):
            await runtime.get("/workspace/out-link", runtimes.scratch / "link")
        with pytest.raises(FileNotFoundError):
            await runtime.get("/workspace/out/folder/key", runtimes.scratch / "through")
        assert not any("hunter2" in path.read_text() for path in out.rglob("*") if path.is_file())
        await runtime.get("/workspace/out", runtimes.scratch / "all", all_links=True)
        assert os.readlink(runtimes.scratch / "all/absolute") == f"{secret}/key"
        assert os.readlink(runtimes.scratch / "all/sly") == "below/../../../x"
        assert {path.name for path in (runtimes.scratch / "all").iterdir() if not path.is_symlink()} == {
            "below",
            "file",
        }

    async def test_what_comes_out_is_capped(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(runtime, "head -c 100000 /dev/zero > large; mkdir many; cd many; touch $(seq 300)")
        await runtime.put(b"", "/workspace/holes")
        await runtimes.run_script(runtime, "dd if=/dev/zero of=holes bs=1 count=1 seek=1000000000000 2>/dev/null")
        for inside in ("large", "many", "holes"):
            with pytest.raises(TransferTooLargeError):
                await runtime.get(f"/workspace/{inside}", runtimes.scratch / "out", max_bytes=50_000)
            assert sorted(path.name for path in runtimes.scratch.iterdir() if "out" in path.name) == []
        await runtime.get("/workspace/large", runtimes.scratch / "out", max_bytes=200_000)

    @requires("root")
    async def test_mounted_folders_can_only_be_read(self, runtimes: RuntimeFactory) -> None:
        shared = runtimes.scratch / "shared"
        shared.mkdir()
        (shared / "tool").write_text("of the machine")
        runtime = await runtimes.start_runtime(mounts=(Mount(shared, "/opt/shared"),))
        ran = await runtimes.run_script(
            runtime, "cat /opt/shared/tool; echo changed > /opt/shared/tool; rm -f /opt/shared/tool"
        )
        assert ran.output.startswith("of the machine")
        assert (shared / "tool").read_text() == "of the machine"

    # Walls

    @requires("root")
    async def test_home_and_workdir_are_the_same_in_every_runtime(self, runtimes: RuntimeFactory) -> None:
        for _ in range(2):
            ran = await runtimes.run_script(
                await runtimes.start_runtime(), "pwd; echo $HOME; touch here $HOME/there && hostname"
            )
            assert ran.output.splitlines()[:2] == ["/workspace", "/home/agent"]
            assert ran.exit_code == 0

    @requires("root")
    async def test_runtimes_do_not_see_each_other_nor_the_machine(self, runtimes: RuntimeFactory) -> None:
        secret = f"key-{secrets.token_hex(8)}"
        one, other = await runtimes.start_runtime(env={"KEY": secret}), await runtimes.start_runtime()
        running = asyncio.create_task(
            runtimes.run_script(one, f"echo {secret} > mine; echo {secret} > /tmp/mine; sleep 60")
        )
        await asyncio.sleep(0.2)
        look = "ps ax; cat /proc/*/environ /proc/*/cmdline; cat /tmp/* /workspace/* /dev/shm/*; ls -la / /tmp /home; id"
        seen = await runtimes.run_script(other, f"({look}) 2>&1 | tr '\\0' '\\n'")
        assert secret not in seen.output
        machine = await runtimes.run_script(
            other, f"ls {runtimes.state} {Path(__file__)} {Path.home() / '.ssh'}; cat /etc/shadow; kill -9 -1"
        )
        assert "No such file" in machine.output
        assert "root:" not in machine.output
        assert not running.done()
        await one.stop()
        await running

    @requires("root")
    async def test_the_kernel_can_not_be_told_anything(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        for script in (
            "cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness",  # harmless where it works
            "cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern",
            "mount -t tmpfs none /mnt",
            "mount -o remount,rw /",
            "head -c 1 /proc/kcore | grep -q .",
            "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk",
        ):
            assert (await runtimes.run_script(runtime, script)).exit_code != 0, script

    @requires("root")
    async def test_a_runtime_outlives_what_its_commands_do_to_it(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        await runtimes.run_script(runtime, "kill -9 1; kill -9 -1", timeout=30)
        assert (await runtimes.run_script(runtime, "echo alive")).output == "alive\n"
        orphans = "for i in 1 2 3 4 5; do (setsid true &); done; sleep 0.3; cat /proc/[0-9]*/stat | grep -c ') Z ' "
        assert (await runtimes.run_script(runtime, orphans)).output == "0\n"

    @requires("network")
    async def test_the_gateway_is_reached_and_nothing_else(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime()
        host, _, port = runtime.gateway_url().removeprefix("http://").rpartition(":")
        asked = await asyncio.gather(
            *(runtimes.run_script(runtime, REQUEST_SCRIPT.format(host=host, port=port)) for _ in range(4))
        )
        assert all(ran.output.endswith("hello") for ran in asked)
        there = runtimes.gateway.rpartition(":")[2]
        for other in (("127.0.0.1", there), ("127.0.0.1", "22"), ("1.1.1.1", "53"), ("169.254.169.254", "80")):
            ran = await runtimes.run_script(
                runtime, f"timeout 2 bash -c '{REQUEST_SCRIPT.format(host=other[0], port=other[1])}'"
            )
            assert ran.exit_code != 0, other
            assert "hello" not in ran.output
        interfaces = await runtimes.run_script(runtime, "cat /proc/net/dev")
        assert [line.split(":")[0].strip() for line in interfaces.output.splitlines()[2:]] == ["lo"]

    @requires("network")
    async def test_without_a_network_there_is_not_even_the_gateway(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(network="none")
        host, _, port = runtime.gateway_url().removeprefix("http://").rpartition(":")
        assert (await runtimes.run_script(runtime, REQUEST_SCRIPT.format(host=host, port=port))).exit_code != 0

    # Limits

    @requires("memory")
    async def test_a_command_that_takes_too_much_memory_says_so(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(memory_mb=64))
        ran = await runtimes.run_script(runtime, EXHAUST_MEMORY_SCRIPT)
        assert ran.completed.out_of_memory
        alone = await runtime.run(["bash", "-c", "exec tail -n 1 < <(head -c 300000000 /dev/zero) > /dev/null"])
        assert (alone.exit_code, alone.out_of_memory) == (None, True)
        assert (await runtimes.run_script(runtime, "echo alive")).output == "alive\n"
        assert not (await runtimes.run_script(runtime, "exit 1")).completed.out_of_memory

    @requires("processes")
    async def test_processes_are_limited(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(processes=20))
        output = runtimes.scratch / "started"
        script = "for i in $(seq 60); do sleep 60 & echo $i; done"
        await runtime.run(["sh", "-c", script], output=output, timeout=2)
        counted = [line for line in output.read_text().splitlines() if line.isdigit()]
        assert 0 < len(counted) <= 20
        after = await runtime.run(["true"])  # what the first left may stand in its way: its own failure, not ours
        assert after.exit_code in (0, 126)

    @requires("disk")
    async def test_the_disk_is_limited(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(disk_mb=32))
        ran = await runtimes.run_script(runtime, "head -c 60000000 /dev/zero > /workspace/big")
        assert ran.exit_code != 0
        assert "No space left" in ran.output
        ran = await runtimes.run_script(
            runtime, "rm big; head -c 10000000 /dev/zero > /tmp/small && stat -c %s /tmp/small"
        )
        assert ran.output == "10000000\n"

    @requires("cpu")
    async def test_cpu_time_is_limited(self, runtimes: RuntimeFactory) -> None:
        runtime = await runtimes.start_runtime(limits=Limits(cpus=0.2))
        script = (
            "timeout 1 sh -c 'while :; do :; done'; cut -d ' ' -f 16,17 /proc/$$/stat"  # of ended children, in ticks
        )
        ticks = sum(int(word) for word in (await runtimes.run_script(runtime, script)).output.split())
        assert ticks <= 60  # of 100

    # Crowds and crashes

    async def test_many_at_once(self, runtimes: RuntimeFactory) -> None:
        async def one(index: int) -> str:
            runtime = await runtimes.start_runtime()
            ran = await runtimes.run_script(runtime, f"echo {index} > file; setsid sleep 60 & cat file")
            await runtime.remove()
            return ran.output

        outputs = await asyncio.gather(*(one(index) for index in range(self.parallel_runtimes)))
        assert outputs == [f"{index}\n" for index in range(self.parallel_runtimes)]

    @contextlib.asynccontextmanager
    async def run_another_node(self, activity: str, runtimes: RuntimeFactory, ids: list[str]) -> AsyncIterator[None]:
        """At work within, and killed."""
        plugin = f"{self.plugin.__module__}:{self.plugin.__qualname__}"
        arguments = (activity, plugin, str(runtimes.state), self.image or "-", runtimes.mark, *ids)
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-m", killed_node.__name__, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert other.stdout is not None
        assert await other.stdout.readline() == b"running\n"
        yield
        other.kill()
        await other.wait()
        other._transport.close()  # type: ignore[attr-defined]

    async def test_what_a_killed_node_left_is_swept(self, runtimes: RuntimeFactory) -> None:
        ids = [runtimes.new_id() for _ in range(3)]
        async with self.run_another_node("run", runtimes, ids):
            assert await runtimes.backend.sweep() == []  # its owner lives
        assert sorted(await runtimes.backend.sweep()) == sorted(ids)
        assert await runtimes.backend.sweep() == []
        own = await runtimes.start_runtime()
        assert (await runtimes.run_script(own, "echo alive")).output == "alive\n"

    @pytest.mark.parametrize("after", [0.0, 0.07, 0.19, 0.43])
    async def test_a_node_may_be_killed_at_any_moment(self, runtimes: RuntimeFactory, after: float) -> None:
        ids = [runtimes.new_id() for _ in range(4)]
        async with self.run_another_node("churn", runtimes, ids):
            await asyncio.sleep(after)
        told = runtimes.mark if self.dies_with_its_node else str(runtimes.state)  # an engine's client may be under way
        async with asyncio.timeout(_SETTLE_SECONDS):
            while leftovers.list_processes(told, children=False):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.02)
        await runtimes.backend.sweep()
        assert await runtimes.backend.sweep() == []

"""What is `bubblewrap`'s own where the node is not root: one user on both sides of the wall, and no disk of its own.

As root these tests make sandboxes as root of a user namespace does; tests/contract/test_ordinary_user.py runs them as a
user."""

import asyncio
import logging
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtimes.base import Limits, Mount, RuntimeSpec, SandboxError
from polar.runtimes.bubblewrap import Bubblewrap, BubblewrapRuntime, privileges
from polar.runtimes.trial import run_trial
from polar.testing import leftovers
from tests.conditions import wait_until

pytestmark = pytest.mark.runtimes


@pytest.fixture
async def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bubblewrap]:
    monkeypatch.setattr(privileges, "may_mount", lambda: False)
    kind = Bubblewrap(tmp_path / "state", "http://127.0.0.1:9")
    if (why := await kind.check_availability()) is not None:
        pytest.skip(f"no bubblewrap here: {why}")
    yield kind
    await kind.close()


async def start(kind: Bubblewrap, id: str = "id", spec: RuntimeSpec | None = None) -> BubblewrapRuntime:
    runtime = await kind.create(id, spec or RuntimeSpec())
    await runtime.start()
    return runtime


async def shell(runtime: BubblewrapRuntime, script: str, output: Path) -> tuple[int | None, str]:
    completed = await runtime.run(["bash", "-c", script], output=output)
    return completed.exit_code, output.read_text()  # noqa: ASYNC240


async def test_files_without_permissions_come_out_and_are_removed(kind: Bubblewrap, tmp_path: Path) -> None:
    """An agent that closes its files to the node's user must not make the platform fail."""
    runtime = await start(kind)
    script = "mkdir -p closed/below; echo kept > closed/below/file; chmod -R 000 closed /home/agent; chmod 000 ."
    assert (await shell(runtime, script, tmp_path / "output"))[0] == 0
    await runtime.stop()
    await runtime.put(b"graded", "/workspace/closed/below/new")
    await runtime.put(b"graded", "/home/agent/new")
    found = await runtime.list_entries("/workspace")
    assert {path.removeprefix("/workspace/closed/") for path in found} >= {"below/file", "below/new"}
    await runtime.get("/workspace/closed/below", tmp_path / "got")
    assert (tmp_path / "got/file").read_text() == "kept\n"
    await runtime.delete(["/workspace/closed/below/file"])
    assert "/workspace/closed/below/file" not in await runtime.list_entries("/workspace")
    with pytest.raises(FileNotFoundError):
        await runtime.get("/workspace/closed/below/file", tmp_path / "got")
    await runtime.restart()
    assert (await shell(runtime, "cat closed/below/new", tmp_path / "output")) == (0, "graded")
    await runtime.remove()


async def test_processes_of_the_same_user_are_out_of_reach(kind: Bubblewrap, tmp_path: Path) -> None:
    outside = subprocess.Popen(["sleep", "300"], env={"SECRET": "hunter2"})  # noqa: ASYNC220
    one, other = await start(kind, "one"), await start(kind, "other")
    try:
        running = asyncio.create_task(one.run(["sh", "-c", "echo > up; exec sleep 300"], env={"SECRET": "hunter3"}))
        await wait_until(
            lambda: any("sleep 300" in line for line in leftovers.list_processes("hunter3", children=False))
        )
        spy = "ps ax; cat /proc/*/environ; ls -l /proc/*/root/workspace; kill -9 -1; kill -9 {0}; ls /proc/{0}"
        _, said = await shell(other, spy.format(outside.pid), tmp_path / "output")
        assert "hunter" not in said
        assert "300" not in said
        assert "up" not in said.split()
        assert outside.poll() is None
        assert not running.done()
        await one.stop()
        await running
    finally:
        outside.kill()
        outside.wait()


async def test_the_users_own_files_are_out_of_reach(kind: Bubblewrap, tmp_path: Path) -> None:
    """They belong to root inside, by number; only the mounts keep them out."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "tool").write_text("of the machine")
    runtime = await start(kind, spec=RuntimeSpec(mounts=(Mount(shared, "/opt/shared"),)))
    script = f"cat {secret} /proc/1/root{secret} /proc/*/cwd/../..{secret}; ls {tmp_path}; find / -xdev -name secret"
    _, said = await shell(runtime, script, tmp_path / "output")
    assert "hunter2" not in said
    assert "No such file" in said
    for attack in (
        "echo x > /opt/shared/tool",
        "chmod 777 /opt/shared",
        "mount -o remount,rw,bind /opt/shared",
        "unshare -U true",
        "unshare -Ur mount -t tmpfs none /mnt",
        "nsenter -t 1 -m true",
        "echo x > /usr/bin/cat",
        "echo '0 0 1' > /proc/self/uid_map",
        "chown 1 /workspace",
    ):
        assert (await shell(runtime, attack, tmp_path / "output"))[0] != 0, attack
    assert (shared / "tool").read_text() == "of the machine"


async def test_setuid_programs_give_nothing(kind: Bubblewrap, tmp_path: Path) -> None:
    runtime = await start(kind)
    script = "grep NoNewPrivs /proc/self/status; cp /usr/bin/id own; chmod 4755 own; ./own -u; cat /proc/self/uid_map"
    _, said = await shell(runtime, script, tmp_path / "output")
    assert said.split() == ["NoNewPrivs:", "1", "0", "0", "0", "1"]
    _, said = await shell(runtime, "mount | head -1; su nobody -s /bin/sh -c id", tmp_path / "output")
    assert "uid=65534" not in said


async def test_system_calls_are_filtered(kind: Bubblewrap, tmp_path: Path) -> None:
    """For the first process as for commands, and not where the task wants none."""
    keys = "import ctypes, errno, os, sys; libc = ctypes.CDLL(None, use_errno=True)\n"
    keys += "libc.syscall({'x86_64': 250, 'aarch64': 219}[os.uname().machine], 0, 0)\n"
    keys += "print(errno.errorcode.get(ctypes.get_errno()))"
    script = f'grep -h "^Seccomp:" /proc/1/status /proc/self/status; python3 -c "{keys}"'
    _, said = await shell(await start(kind), script, tmp_path / "output")
    assert said.split() == ["Seccomp:", "2", "Seccomp:", "2", "ENOSYS"]
    _, said = await shell(await start(kind, "open", RuntimeSpec(seccomp=False)), script, tmp_path / "output")
    assert said.split()[:4] == ["Seccomp:", "0", "Seccomp:", "0"]
    assert said.split()[-1] != "ENOSYS"


async def test_mounts_are_unnamed_and_terminals_counted(kind: Bubblewrap, tmp_path: Path) -> None:
    shown = tmp_path / "shown:with,separators"
    shown.mkdir()
    (shown / "tool").write_text("of the machine")
    runtime = await start(kind, spec=RuntimeSpec(mounts=(Mount(shown, "/opt/shown"),)))
    script = "cat /opt/shown/tool /proc/self/mountinfo /proc/self/mounts"
    _, said = await shell(runtime, script, tmp_path / "output")
    assert said.startswith("of the machine")
    assert tmp_path.name not in said
    many = "import os; held = []\ntry:\n  while len(held) < 100: held.append(os.openpty())\n"
    many += "except OSError: print(len(held))"
    _, said = await shell(runtime, f'python3 -c "{many}"', tmp_path / "output")
    assert said == "64\n"


async def test_a_disk_limit_limits_files_and_says_so(
    kind: Bubblewrap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runtime = await start(kind, spec=RuntimeSpec(limits=Limits(disk_mb=1)))
        await start(kind, "another", RuntimeSpec(limits=Limits(disk_mb=1)))
    assert [record.message for record in caplog.records if "disk" in record.message] == [
        "The disk of a sandbox can't be limited without root: only the size of each file is limited."
    ]
    script = "ulimit -f unlimited; head -c 2000000 /dev/zero > big; stat -c %s big"
    _, said = await shell(runtime, script, tmp_path / "output")
    assert str(1 << 20) in said.split()


async def test_a_trial_works_and_names_what_is_missing(kind: Bubblewrap) -> None:
    assert await run_trial(kind) is None
    assert kind.list_isolation_gaps()[-2:] == [
        "disk limit (only the size of each file)",
        "user ids (inotify, pipes and signals are shared)",
    ]
    assert kind.runtimes == {}


async def test_everything_ends_with_the_spawner(kind: Bubblewrap) -> None:
    runtime = await start(kind)
    running = asyncio.create_task(runtime.run(["sleep", "300"]))
    await wait_until(lambda: runtime._init_pidfd is not None)
    process = kind.spawner.process
    assert process is not None
    process.kill()
    await asyncio.to_thread(process.wait)
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError):
        await runtime.run(["true"])
    await runtime.remove()
    again = await start(kind, "again")
    assert (await again.run(["true"])).exit_code == 0


async def test_folders_with_long_names_and_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "may_mount", lambda: False)
    folder = tmp_path / "with:colon,comma and space" / ("long" * 50) / ("longer" * 40)
    kind = Bubblewrap(folder, "http://127.0.0.1:9")
    try:
        assert await kind.check_availability() is None
        runtime = await start(kind)
        assert (await runtime.run(["true"])).exit_code == 0
    finally:
        await kind.close()

"""An attacker in one sandbox, and what its neighbour and the machine notice of it (make test-runtimes)."""

import asyncio
import errno
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes import seccomp
from polar.runtimes.base import Limits, Mount, Runtime, RuntimeSpec
from polar.runtimes.bubblewrap import Bubblewrap
from polar.runtimes.bubblewrap.privileges import may_mount
from tests.attack import sandbox_attacks as attacks
from tests.conditions import wait_until

pytestmark = pytest.mark.runtimes

PYTHON = "/usr/bin/python3"


class Sandboxes:
    def __init__(self, kind: Bubblewrap, scratch: Path) -> None:
        self.kind = kind
        self._scratch = scratch

    async def new(self, **changes: Any) -> Runtime:
        runtime = await self.kind.create(f"walls-{secrets.token_hex(6)}", RuntimeSpec(**changes))
        await runtime.start()
        return runtime

    async def run(self, runtime: Runtime, program: str, stdin: bytes = b"") -> dict[str, Any]:
        """What the program told; it may hold what it has until the file `go` is there."""
        output = self._scratch / secrets.token_hex(6)
        done = await runtime.run([PYTHON, "-c", program], stdin=stdin, output=output, timeout=300)
        assert done.exit_code == 0, output.read_text()
        return dict(json.loads(output.read_text().splitlines()[-1]))


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[Sandboxes]:
    kind = Bubblewrap(tmp_path / "state-of-the-node", "http://127.0.0.1:9")
    if (why := await kind.check_availability()) is not None:
        pytest.skip(f"no bubblewrap here: {why}")
    if not os.access(PYTHON, os.X_OK):
        pytest.skip(f"the attacks are programs for {PYTHON}")
    await kind.prepare(None)
    yield Sandboxes(kind, tmp_path)
    await kind.close()


def calls(*, own_users: bool) -> list[list[Any]]:
    machine = seccomp.detect_architecture()
    found = seccomp.list_denied(seccomp.NO_ALLOWANCES, own_users=own_users)
    return [[call.name, number] for call, _ in found if (number := getattr(call, str(machine))) is not None]


async def test_refused_calls_answer_as_the_table_says(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.new()
    asked = json.dumps(calls(own_users=True)).encode()
    answers = (await sandboxes.run(runtime, attacks.CALLS, asked))["answers"]
    table = {call.name: number for call, number in seccomp.list_denied(seccomp.NO_ALLOWANCES, own_users=True)}
    assert answers == {name: table[name] for name in answers}
    assert len(answers) > 40


async def test_keys_are_neither_kept_nor_seen(sandboxes: Sandboxes) -> None:
    found = [await sandboxes.run(await sandboxes.new(), attacks.KEYS) for _ in range(2)]
    assert found == [{"added": [], "read": ""}] * 2
    assert "polar-secret" not in Path("/proc/keys").read_text()  # noqa: ASYNC240  no disk


@pytest.mark.parametrize("what", attacks.FLOODS)
async def test_what_is_used_up_is_ones_own(sandboxes: Sandboxes, what: str) -> None:
    """While one sandbox holds all that it can get, its neighbour and the machine have what they need."""
    attacker, neighbour = await sandboxes.new(), await sandboxes.new()
    make = attacks.FLOODS[what]
    flood = attacks.FLOOD.replace("{make}", make).replace("{most}", "150000" if what == "signals" else "9000")
    attacking = asyncio.create_task(sandboxes.run(attacker, flood))

    async def holds() -> bool:
        return attacking.done() or "/workspace/holds" in await attacker.list_entries("/workspace/holds")

    while not await holds():  # noqa: ASYNC110  a file tells nobody
        await asyncio.sleep(0.02)
    try:
        seen = await sandboxes.run(neighbour, attacks.NEIGHBOUR.replace("{make}", make))
        machine = await asyncio.create_subprocess_exec(
            PYTHON, "-c", attacks.NEIGHBOUR.replace("{make}", make), stdout=asyncio.subprocess.PIPE
        )
        on_the_machine = json.loads((await machine.communicate())[0])
    finally:
        await attacker.put(b"", "/workspace/go")
    flooded = await attacking
    assert flooded["count"] > 0
    for found in (seen, on_the_machine):
        assert (found["count"], found["why"]) == (8, None)
        assert found["pipe"] == 65536  # not cut, as for users who have too many
    if what == "terminals":
        assert flooded["count"] <= 64


async def test_only_usual_sockets_can_be_opened(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(await sandboxes.new(), attacks.FAMILIES)
    assert found == {"opened": [], "usual": [None] * 5, "modules": [], "netlink": []}


async def test_foreign_calls_and_filters_of_ones_own_lead_nowhere(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(await sandboxes.new(), attacks.FOREIGN)
    assert {found.pop(name) for name in ("i386", "x32") if name in found} <= {errno.ENOSYS}
    assert found == {"own filter": 0, "notifying": True, "keyctl": errno.ENOSYS}


async def test_no_namespace_can_be_made_or_entered(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(await sandboxes.new(), attacks.NAMESPACES)
    assert found == {"clone3": errno.ENOSYS, "unshare": [], "clone": [], "setns": []}


async def test_no_file_of_the_kernels_can_be_written(sandboxes: Sandboxes) -> None:
    assert (await sandboxes.run(await sandboxes.new(), attacks.KERNEL_FILES))["opened"] == []


async def test_the_first_process_is_as_confined_as_commands(sandboxes: Sandboxes) -> None:
    found = await sandboxes.run(await sandboxes.new(), attacks.FIRST_PROCESS)
    assert found["seccomp"] == ["2", "2"]
    assert found["capabilities"][0] == "0" * 16
    assert found["limits"] == ["1", "1"]
    assert found["groups"] == []
    assert found["reopened"] == [True] * 3


async def test_mounts_do_not_tell_where_the_node_has_its_files(sandboxes: Sandboxes, tmp_path: Path) -> None:
    tool = tmp_path / "harness-cache/tool"
    tool.mkdir(parents=True)
    mounts = (Mount(tool, "/opt/tool"),)
    for spec in ({}, {"limits": Limits(disk_mb=32)}):
        runtime = await sandboxes.new(mounts=mounts, **spec)
        for again in range(2):
            output = tmp_path / "output"
            await runtime.run(
                ["cat", "/proc/self/mountinfo", "/proc/self/mounts", "/proc/self/mountstats"], output=output
            )
            told = output.read_text()
            assert "/opt/tool" in told
            for name in (tmp_path.name, "state-of-the-node", "harness-cache", runtime.id):
                assert name not in told
            if not again:
                await runtime.stop()
                await runtime.restart()


async def test_every_sandbox_is_another_user_outside(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """Also of another node, and after one before it is gone."""
    other = Bubblewrap(tmp_path / "other", "http://127.0.0.1:9")
    await other.prepare(None)
    mark = secrets.token_hex(6)
    runtimes = [await sandboxes.new(env={"MARK": mark}) for _ in range(3)]
    runtimes.append(await other.create(f"walls-{mark}", RuntimeSpec(env={"MARK": mark})))
    await runtimes[-1].start()
    running = [asyncio.create_task(runtime.run(["sleep", "300"])) for runtime in runtimes]

    def users() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if b"sleep" in (folder / "cmdline").read_bytes() and mark.encode() in (folder / "environ").read_bytes():
                    found.append(folder.stat().st_uid)
            except OSError:
                continue
        return found

    await wait_until(lambda: len(users()) == len(runtimes))
    assert len(set(users())) == len(runtimes)
    assert min(users()) > 65536
    await other.close()
    for runtime in runtimes[:-1]:
        await runtime.remove()
    await asyncio.gather(*running, return_exceptions=True)


async def test_files_keep_their_owners_over_a_restart(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.new()
    await runtime.run(["sh", "-c", "echo one > own; mkdir folder; echo x >> /etc/profile"])
    await runtime.put(b"two", "/workspace/put/file")
    await runtime.stop()
    await runtime.put(b"three", "/workspace/late/file")
    await runtime.restart()
    output = tmp_path / "output"
    script = "stat -c %u:%g / /etc/profile /tmp own folder put put/file late/file; echo x >> put/file"
    done = await runtime.run(["sh", "-c", f"{script} && echo x >> late/file && rm -r late"], output=output)
    assert (done.exit_code, set(output.read_text().split())) == (0, {"0:0"})
    await runtime.run(["stat", "-c", "%u:%g", "/usr", "/usr/bin/env"], output=output)
    of_the_machine = "0:0" if may_mount() else "65534:65534"  # root's, whom an ordinary user's namespace does not know
    assert set(output.read_text().split()) == {of_the_machine}


async def test_a_task_can_opt_out(sandboxes: Sandboxes) -> None:
    names = ("io_uring_setup", "keyctl", "AF_ALG")
    asked = [call for call in calls(own_users=True) if call[0] in names]
    refused = (await sandboxes.run(await sandboxes.new(), attacks.CALLS, json.dumps(asked).encode()))["answers"]
    assert set(refused.values()) == {errno.ENOSYS}
    for filtered in (False, tuple(sorted(names))):
        runtime = await sandboxes.new(seccomp=filtered)
        allowed = (await sandboxes.run(runtime, attacks.CALLS, json.dumps(asked).encode()))["answers"]
        assert errno.ENOSYS not in allowed.values()
    runtime = await sandboxes.new(seccomp=False)
    found = await sandboxes.run(runtime, attacks.FIRST_PROCESS)
    assert found["seccomp"] == ["0", "0"]

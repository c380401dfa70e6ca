"""Where groups are made, and what is written to them, on machines of each kind."""

import asyncio
from pathlib import Path

import pytest

from polar.runtimes.base import Limits
from polar.runtimes.cgroups import Cgroup, CgroupHierarchies, build_limit_files, find_own_cgroups

V2 = ("0::/system.slice/polar.service\n", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
V1 = (
    "9:memory:/user/one\n8:cpu,cpuacct:/user\n7:pids:/\n1:name=systemd:/user\n",
    "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 23 0:29 / /sys/fs/cgroup/pids rw shared:9 - cgroup cgroup rw,pids\n",
)
IN_A_CONTAINER = (
    "9:memory:/docker/abc\n",
    "31 23 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
)


def test_version_2() -> None:
    assert find_own_cgroups(*V2) == (Path("/sys/fs/cgroup/system.slice/polar.service"), {})


def test_version_1() -> None:
    unified, found = find_own_cgroups(*V1)
    assert unified is None
    assert found["memory"] == Path("/sys/fs/cgroup/memory/user/one")
    assert found["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct/user")
    assert found["pids"] == Path("/sys/fs/cgroup/pids")


def test_both() -> None:
    unified, found = find_own_cgroups(
        V1[0] + "0::/\n", V1[1] + V2[1].replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    )
    assert unified == Path("/sys/fs/cgroup/unified")
    assert set(found) >= {"memory", "cpu", "pids"}


def test_a_mount_that_shows_only_a_part() -> None:
    assert find_own_cgroups(*IN_A_CONTAINER) == (None, {"memory": Path("/sys/fs/cgroup/memory")})


def test_limits_are_written_as_each_version_wants_them() -> None:
    limits = Limits(cpus=1.5, memory_mb=64, processes=10)
    assert build_limit_files(limits, 2, frozenset()) == {
        "memory": {"memory.limit_in_bytes": str(64 << 20), "memory.memsw.limit_in_bytes": str(64 << 20)},
        "pids": {"pids.max": "12"},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"},
    }
    assert build_limit_files(limits, 2, frozenset({"memory", "pids", "cpu"})) == {
        "memory": {"memory.max": str(64 << 20), "memory.swap.max": "0"},
        "pids": {"pids.max": "12"},
        "cpu": {"cpu.max": "150000 100000"},
    }
    assert build_limit_files(Limits(processes=None), 2, frozenset()) == {}


def test_on_version_2_one_group_has_it_all() -> None:
    cgroups = CgroupHierarchies(Path("/g"), frozenset({"memory", "pids", "cpu"}), {})
    group = cgroups.build_cgroup("id", Limits(memory_mb=64), own_processes=1)
    assert group is not None
    assert group.folders == (Path("/g/polar-id"),)
    assert (group.entry.unified_folder, group.entry.tasks_files) == ("/g/polar-id", ())
    assert cgroups.missing_controllers == ()


def test_on_version_1_each_limit_has_its_own() -> None:
    cgroups = CgroupHierarchies(None, frozenset(), {"memory": Path("/m"), "pids": Path("/p")})
    group = cgroups.build_cgroup("id", Limits(memory_mb=64, cpus=1), own_processes=1)
    assert group is not None
    assert group.folders == (Path("/p/polar-id"), Path("/m/polar-id"))
    assert (group.entry.unified_folder, group.entry.tasks_files) == (None, ("/p/polar-id/tasks", "/m/polar-id/tasks"))
    assert cgroups.missing_controllers == ("cpu",)
    assert cgroups.parents == [Path("/p"), Path("/m")]


def test_where_there_are_none_there_is_no_group() -> None:
    cgroups = CgroupHierarchies(None, frozenset(), {})
    assert cgroups.build_cgroup("id", Limits(), own_processes=1) is None
    assert cgroups.missing_controllers == ("memory", "pids", "cpu")
    assert cgroups.parents == []


# Files as the kernel has them, without a kernel behind them: what is read and written, and no more.

CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
EVENTS = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n"


@pytest.mark.parametrize(("file", "content"), [("memory.events", EVENTS), ("memory.oom_control", CONTROL)])
def test_deaths_for_want_of_memory_are_counted(tmp_path: Path, file: str, content: str) -> None:
    killing, memory = tmp_path / "killing", tmp_path / "memory"
    killing.mkdir()
    memory.mkdir()
    group = Cgroup.from_folders((killing, memory))
    assert group.count_oom_kills() == 0
    (memory / file).write_text(content)
    assert [group.count_oom_kills(), group.count_oom_kills()] == [2, 2]
    (memory / file).unlink()  # with its group
    assert group.count_oom_kills() == 0


async def test_on_version_2_a_group_is_killed_as_one(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "below/cgroup.procs").write_text("4194305\n")  # more than there can be
    (tmp_path / "cgroup.kill").write_text("")
    killing = asyncio.create_task(Cgroup.from_folders((tmp_path,)).kill())
    while not (tmp_path / "cgroup.kill").read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not killing.done()
    (tmp_path / "below/cgroup.procs").write_text("")
    await killing
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_groups_are_looked_for_once_in_a_process() -> None:
    assert CgroupHierarchies.detect() is CgroupHierarchies.detect()

"""Where groups are made, and what is written to them, on machines of each kind."""

from pathlib import Path

from polar.runtimes.base import Limits
from polar.runtimes.cgroups import Cgroups, own_groups, settings

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
    assert own_groups(*V2) == (Path("/sys/fs/cgroup/system.slice/polar.service"), {})


def test_version_1() -> None:
    unified, found = own_groups(*V1)
    assert unified is None
    assert found["memory"] == Path("/sys/fs/cgroup/memory/user/one")
    assert found["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct/user")
    assert found["pids"] == Path("/sys/fs/cgroup/pids")


def test_both() -> None:
    unified, found = own_groups(V1[0] + "0::/\n", V1[1] + V2[1].replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    assert unified == Path("/sys/fs/cgroup/unified")
    assert set(found) >= {"memory", "cpu", "pids"}


def test_a_mount_that_shows_only_a_part() -> None:
    assert own_groups(*IN_A_CONTAINER) == (None, {"memory": Path("/sys/fs/cgroup/memory")})


def test_limits_are_written_as_each_version_wants_them() -> None:
    limits = Limits(cpus=1.5, memory_mb=64, processes=10)
    assert settings(limits, 2, frozenset()) == {
        "memory": {"memory.limit_in_bytes": str(64 << 20), "memory.memsw.limit_in_bytes": str(64 << 20)},
        "pids": {"pids.max": "12"},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"},
    }
    assert settings(limits, 2, frozenset({"memory", "pids", "cpu"})) == {
        "memory": {"memory.max": str(64 << 20), "memory.swap.max": "0"},
        "pids": {"pids.max": "12"},
        "cpu": {"cpu.max": "150000 100000"},
    }
    assert settings(Limits(processes=None), 2, frozenset()) == {}


def test_on_version_2_one_group_has_it_all() -> None:
    cgroups = Cgroups(Path("/g"), frozenset({"memory", "pids", "cpu"}), {})
    group = cgroups.group("id", Limits(memory_mb=64), own=1)
    assert group is not None
    assert group.folders == (Path("/g/polar-id"),)
    assert (group.entry.into, group.entry.tasks) == ("/g/polar-id", ())
    assert cgroups.missing == ()


def test_on_version_1_each_limit_has_its_own() -> None:
    cgroups = Cgroups(None, frozenset(), {"memory": Path("/m"), "pids": Path("/p")})
    group = cgroups.group("id", Limits(memory_mb=64, cpus=1), own=1)
    assert group is not None
    assert group.folders == (Path("/p/polar-id"), Path("/m/polar-id"))
    assert (group.entry.into, group.entry.tasks) == (None, ("/p/polar-id/tasks", "/m/polar-id/tasks"))
    assert cgroups.missing == ("cpu",)
    assert cgroups.parents == [Path("/p"), Path("/m")]


def test_where_there_are_none_there_is_no_group() -> None:
    cgroups = Cgroups(None, frozenset(), {})
    assert cgroups.group("id", Limits(), own=1) is None
    assert cgroups.missing == ("memory", "pids", "cpu")
    assert cgroups.parents == []

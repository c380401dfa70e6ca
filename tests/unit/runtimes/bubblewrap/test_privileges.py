"""Why sandboxes can't be made here: each reason is named with its own fix."""

import errno
import platform
from pathlib import Path

import pytest

from polar.runtimes.bubblewrap import privileges
from polar.runtimes.bubblewrap.privileges import ProbeFailure, explain_failure, find_file_system


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    monkeypatch.setattr(privileges, "_read_sysctl", lambda name: values.get(name.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("step", "number", "values", "said"),
    [
        ("namespace", errno.ENOSPC, {"max_user_namespaces": "0"}, "is 0. As root: `sysctl user.max_user_namespaces="),
        ("namespace", errno.EPERM, {"unprivileged_userns_clone": "0"}, "`sysctl kernel.unprivileged_userns_clone=1`"),
        ("namespace", errno.EPERM, {}, "--security-opt seccomp=unconfined"),
        ("namespace", errno.EINVAL, {}, "CONFIG_USER_NS"),
        ("namespace", errno.EACCES, {"apparmor_restrict_unprivileged_userns": "1"}, "apparmor_restrict_unprivileged"),
        ("mounts", errno.EPERM, {"apparmor_restrict_unprivileged_userns": "1"}, "apparmor_restrict_unprivileged"),
        ("overlay", errno.EACCES, {"apparmor_restrict_unprivileged_userns": "1"}, "apparmor_restrict_unprivileged"),
        ("overlay", errno.ENODEV, {}, "modprobe overlay"),
        ("overlay", errno.EINVAL, {}, "--data"),
        ("layer", errno.EIO, {}, "--data"),
        ("hang", errno.ETIMEDOUT, {}, "hang"),
    ],
)
def test_each_reason_has_its_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, number: int, values: dict[str, str], said: str
) -> None:
    settings(monkeypatch, **values)
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-18-amd64")
    assert said in explain_failure(ProbeFailure(step, number), tmp_path, unprivileged=True)


def test_an_old_kernel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings(monkeypatch)
    monkeypatch.setattr(platform, "release", lambda: "5.10.0-28-amd64")
    said = explain_failure(ProbeFailure("overlay", errno.EPERM), tmp_path, unprivileged=True)
    assert said.startswith("Linux 5.10.0-28-amd64 mounts no overlay in a user namespace: use Linux 5.11 or later")


def test_a_folders_file_system_is_known() -> None:
    assert find_file_system(Path("/proc/self")) == "proc"
    assert find_file_system(Path("/proc/sys/kernel")) in ("proc", "tmpfs")


async def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    why = await privileges.check_sandbox_support(tmp_path / "file" / "below", unprivileged=True)
    assert why is not None
    assert str(tmp_path / "file" / "below") in why
    assert "--data" in why

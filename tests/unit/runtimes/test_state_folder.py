"""Owners, their locks, and what they leave."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polar.runtimes import state_folder
from polar.runtimes.base import SandboxError
from polar.runtimes.cgroups import CgroupHierarchies
from polar.runtimes.state_folder import StateFolder, remove_tree


def test_what_lives_is_not_left(tmp_path: Path) -> None:
    one, other = StateFolder(tmp_path), StateFolder(tmp_path)
    one.create_runtime_folder("a")
    assert list(other.iter_abandoned()) == []
    assert list(one.iter_abandoned()) == []
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_process_made_is_left(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from polar.runtimes.state_folder import StateFolder; "
        "from polar.runtimes.cgroups import CgroupHierarchies; s = StateFolder(Path(sys.argv[1])); "
        "s.record_cgroups(CgroupHierarchies(None, frozenset(), {'memory': Path('/m'), 'pids': Path('/p')})); "
        "s.create_runtime_folder('a'); s.create_runtime_folder('b'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    state = StateFolder(tmp_path)
    (left,) = state.iter_abandoned()
    assert [folder.name for folder in left.runtime_folders] == ["a", "b"]
    group = left.find_cgroup("a")
    assert group is not None
    assert group.folders == (Path("/p/polar-a"), Path("/m/polar-a"))
    left.remove()
    assert list(state.iter_abandoned()) == []


def test_without_cgroups_there_is_no_group(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "one")
    state.record_cgroups(CgroupHierarchies(None, frozenset(), {}))
    state.create_runtime_folder("a")
    with pytest.raises(SandboxError, match="already"):
        state.create_runtime_folder("a")
    state.close()


def test_trees_are_removed_whatever_their_permissions(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "shut/below").mkdir(parents=True)
    (tree / "shut/below/file").write_text("text")
    (tree / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    (tmp_path / "kept").mkdir(mode=0o755)
    os.chmod(tree / "shut/below", 0o000)
    os.chmod(tree / "shut", 0o000)
    remove_tree(tree)
    remove_tree(tree)
    assert not tree.exists()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o755


def test_an_owner_is_not_swept_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks just before the lock is taken."""
    one, other = StateFolder(tmp_path), StateFolder(tmp_path)
    found: list[Path] = []
    lock = state_folder._try_lock

    def looked_at(folder: Path) -> int | None:
        monkeypatch.setattr(state_folder, "_try_lock", lock)
        found.extend(left.folder for left in other.iter_abandoned())
        return lock(folder)

    monkeypatch.setattr(state_folder, "_try_lock", looked_at)
    one.create_runtime_folder("a")
    assert found == []
    assert [folder.name for folder in tmp_path.iterdir()] == [one.folder.name]
    one.close()


def test_what_was_never_made_to_its_end_is_left(tmp_path: Path) -> None:
    for name in (".new", ".old"):
        (tmp_path / name / "runtimes").mkdir(parents=True)
    os.utime(tmp_path / ".old", (0, 0))
    assert [left.folder.name for left in StateFolder(tmp_path).iter_abandoned()] == [".old"]
    shutil.rmtree(tmp_path)

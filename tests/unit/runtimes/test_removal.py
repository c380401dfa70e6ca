"""Folders that are hard to remove."""

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from polar.runtimes.state_folder import remove_tree

_names = st.sampled_from(["a", "b", "c"])
_trees = st.recursive(
    st.sampled_from(["file", "link", "up", "pipe"]),
    lambda below: st.dictionaries(_names, below, max_size=3),
    max_leaves=20,
)


def make(tree: object, path: Path, outside: Path) -> None:
    if tree == "file":
        path.write_text("x")
    elif tree == "link":
        path.symlink_to(outside)
    elif tree == "up":
        path.symlink_to("..")
    elif tree == "pipe":
        os.mkfifo(path)
    else:
        assert isinstance(tree, dict)
        path.mkdir()
        for name, below in tree.items():
            make(below, path / name, outside)


@settings(max_examples=50, deadline=None)
@given(tree=st.dictionaries(_names, _trees, max_size=3))
def test_whatever_is_in_a_folder_goes_with_it_and_nothing_else(tmp_path_factory: object, tree: object) -> None:
    folder = tmp_path_factory.mktemp("removed")  # type: ignore[attr-defined]
    (folder / "outside").mkdir()
    (folder / "outside" / "kept").write_text("kept")
    make(tree, folder / "tree", folder / "outside")
    remove_tree(folder / "tree")
    assert not (folder / "tree").exists()
    assert (folder / "outside" / "kept").read_text() == "kept"


def test_folders_deeper_than_a_stack_and_a_path(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("a-name-of-some-length", dir_fd=folder)
        deeper = os.open("a-name-of-some-length", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=folder))
    os.close(folder)
    remove_tree(tmp_path / "a-name-of-some-length")
    assert list(tmp_path.iterdir()) == []


def test_folders_without_permissions(tmp_path: Path) -> None:
    (tmp_path / "top" / "below" / "deeper").mkdir(parents=True)
    (tmp_path / "top" / "below" / "file").write_text("x")
    for path in ("top/below/deeper", "top/below", "top"):
        (tmp_path / path).chmod(0)
    remove_tree(tmp_path / "top")
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_gone_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    remove_tree(tmp_path / "none" / "below")

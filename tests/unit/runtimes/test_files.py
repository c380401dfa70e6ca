"""Files across a runtime's wall: nothing outside is ever read or written, whatever links there are."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.runtimes import files
from polar.runtimes.base import TransferTooLargeError


@pytest.fixture
def root(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "secret").write_text("hunter2")
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    yield opened, folder
    os.close(opened)


def test_a_link_on_the_way_is_resolved_as_inside(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "real").mkdir()
    (folder / "absolute").symlink_to("/real")
    (folder / "up").symlink_to("../../../../real")
    for number, name in enumerate(("absolute", "up")):
        files.put(opened, b"text", f"/{name}/file{number}")
        assert (folder / f"real/file{number}").read_bytes() == b"text"
        files.get(opened, f"/{name}/file{number}", tmp_path / "out", 1000)
    assert sorted(os.listdir(folder)) == ["absolute", "real", "up"]


def test_nothing_is_written_outside(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "out").symlink_to(tmp_path)
    (folder / "file").symlink_to(tmp_path / "secret")
    files.put(opened, b"new", "/out/secret")
    files.put(opened, b"new", "/file")
    files.put(opened, b"new", "/../../secret")
    source = tmp_path / "source"
    source.mkdir()
    (source / "secret").write_text("new")
    (folder / "again").symlink_to(tmp_path)
    files.put(opened, source, "/again")
    assert (tmp_path / "secret").read_text() == "hunter2"
    assert not (folder / "file").is_symlink()


def test_a_path_must_be_absolute(root: tuple[int, Path]) -> None:
    with pytest.raises(ValueError, match="absolute"):
        files.put(root[0], b"", "relative")


def test_the_whole_root_can_be_taken_and_filled(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "a").write_text("one")
    files.get(opened, "/", tmp_path / "out", 10_000)
    (tmp_path / "out/b").write_text("two")
    files.put(opened, tmp_path / "out", "/")
    assert sorted(os.listdir(folder)) == ["a", "b"]


def test_only_files_folders_and_links_come_out(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        (folder / "file").write_text("text")
        files.get(opened, "/", tmp_path / "out", 10_000)
    assert os.listdir(tmp_path / "out") == ["file"]
    for name in ("/pipe", "/socket", "/none"):
        with pytest.raises(FileNotFoundError):
            files.get(opened, name, tmp_path / "none", 10_000)
    assert sorted(os.listdir(tmp_path)) == ["out", "root", "secret"]


def test_special_modes_stay_behind(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o6755)
    (folder / "shut").write_text("text")
    (folder / "shut").chmod(0o000)
    files.get(opened, "/", tmp_path / "out", 10_000)
    assert (tmp_path / "out/tool").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "out/shut").stat().st_mode & 0o7777 == 0o600


def test_endless_folders_are_too_large(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    deep = folder
    for _ in range(300):
        deep = deep / "d"
        deep.mkdir()
    with pytest.raises(TransferTooLargeError):
        files.get(opened, "/", tmp_path / "out", 1 << 30)


def test_what_was_there_is_replaced(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "file").write_text("new")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old")
    files.get(opened, "/file", tmp_path / "out", 1000)
    assert (tmp_path / "out").read_text() == "new"


_NAMES = st.sampled_from(["a", "b", "c", "d"])
_PARTS = st.lists(st.sampled_from(["..", ".", "a", "b", "c", "d"]), min_size=1, max_size=6)


@given(
    links=st.dictionaries(
        st.lists(_NAMES, min_size=1, max_size=4).map(tuple), st.tuples(st.booleans(), _PARTS), max_size=8
    )
)
def test_no_chain_of_links_leads_out(
    links: dict[tuple[str, ...], tuple[bool, list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Trees of arbitrary links: whatever is taken of them, a path through it resolves within it, or nowhere."""
    base = tmp_path_factory.mktemp("links")
    root = base / "root/top"
    root.mkdir(parents=True)
    for place, (absolute, parts) in links.items():
        at = root.joinpath(*place)
        if any(parent.is_symlink() for parent in at.parents) or os.path.lexists(at):
            continue
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to("/" * absolute + "/".join(parts))
    opened = os.open(base / "root", os.O_PATH | os.O_DIRECTORY)
    try:
        files.get(opened, "/top", base / "out", 1 << 20)
    finally:
        os.close(opened)
    for folder, names, others in os.walk(base / "out"):
        for name in (*names, *others):
            resolved = Path(folder, name)
            try:
                resolved = resolved.resolve(strict=True)
            except (OSError, RuntimeError):  # leads nowhere, or round and round
                continue
            assert resolved.is_relative_to(base / "out")


def test_links_that_stay() -> None:
    place = PurePosixPath("a/b/link")
    assert files.stays_below(place, "x")
    assert files.stays_below(place, "../../x/y")
    assert not files.stays_below(place, "../../../x")
    assert not files.stays_below(place, "x/../y")
    assert not files.stays_below(place, "/a")
    assert not files.stays_below(PurePosixPath(), "x")  # the top itself


def test_users_are_found_as_engines_find_them(root: tuple[int, Path]) -> None:
    opened, folder = root
    assert files.resolve_owner(opened, "7") == (7, 0)
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n\nagent:x:1000:1001:An Agent:/:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nstaff:x:50:agent\n")
    for user, owner in {
        "0": (0, 0),
        "root": (0, 0),
        "agent": (1000, 1001),
        "1000": (1000, 1001),
        "agent:staff": (1000, 50),
        "7:50": (7, 50),
        "7:8": (7, 8),
    }.items():
        assert files.resolve_owner(opened, user) == owner
    with pytest.raises(ValueError, match="nobody"):
        files.resolve_owner(opened, "nobody")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_is_made_is_the_owners_and_nothing_else(root: tuple[int, Path], tmp_path: Path) -> None:
    opened, folder = root
    (folder / "old").mkdir()
    (folder / "old/kept").write_text("")
    source = tmp_path / "source"
    (source / "old/new").mkdir(parents=True)
    (source / "old/new/file").write_text("")
    (source / "link").symlink_to("old/kept")
    files.put(opened, source, "/", (1000, 1001))
    files.put(opened, b"", "/a/b/c", (1000, 1001))
    files.make_folders(opened, ("/old", "/old/home"), (1000, 1001))
    found = {str(path.relative_to(folder)): (path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}
    ours = (folder.stat().st_uid, folder.stat().st_gid)
    assert {name for name, owner in found.items() if owner == ours} == {"old", "old/kept"}
    assert {name for name, owner in found.items() if owner == (1000, 1001)} == {*found} - {"old", "old/kept"}

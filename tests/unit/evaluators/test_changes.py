"""What differs between two trees, and the patch of it: real git must make the one of the other."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from polar.evaluators.changes import FileChange, FolderEntry, find_changes, list_entries
from polar.evaluators.patches import make_patch

GIT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}


@pytest.fixture
def before(tmp_path: Path) -> Path:
    (tmp_path / "before").mkdir()
    return tmp_path / "before"


@pytest.fixture
def after(tmp_path: Path) -> Path:
    (tmp_path / "after").mkdir()
    return tmp_path / "after"


def applied(before: Path, text: bytes) -> Path:
    """A copy of `before` to which git applied the patch."""
    place = before.parent / "applied"
    shutil.copytree(before, place, symlinks=True)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=place, input=text, capture_output=True, env=GIT, check=False
    )
    assert done.returncode == 0, done.stderr.decode() + text.decode(errors="replace")
    return place


def assert_reproduced(before: Path, after: Path) -> bytes:
    made = make_patch(before, after, find_changes(before, after))
    assert made.left_out == []
    assert find_changes(applied(before, made.text), after) == []
    return made.text


def write(top: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    file = top / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)


def test_nothing_differs(before: Path, after: Path) -> None:
    for top in (before, after):
        write(top, "a/b", b"same\n")
        (top / "link").symlink_to("a/b")
    os.utime(after / "a/b", (0, 0))
    assert find_changes(before, after) == []
    assert make_patch(before, after, []).text == b""


def test_each_kind_of_change(before: Path, after: Path) -> None:
    write(before, "gone", b"1\n")
    write(before, "text", b"1\n2\n")
    write(after, "text", b"1\n3\n")
    write(before, "same_size_and_time", b"1\n")
    write(after, "same_size_and_time", b"2\n")
    for top in (before, after):
        os.utime(top / "same_size_and_time", (0, 0))
    write(before, "run", b"1\n")
    write(after, "run", b"1\n", 0o755)
    write(after, "new/script", b"#!/bin/sh\n", 0o755)
    (before / "link").symlink_to("text")
    (after / "link").symlink_to("run")
    found = find_changes(before, after)
    assert [(change.kind, change.path) for change in found] == [
        ("deleted", "gone"),
        ("changed", "link"),
        ("added", "new/script"),
        ("changed", "run"),
        ("changed", "same_size_and_time"),
        ("changed", "text"),
    ]
    assert found[3] == FileChange("run", FolderEntry("100644", 2), FolderEntry("100755", 2))
    text = assert_reproduced(before, after)
    assert b"diff --git a/run b/run\nold mode 100644\nnew mode 100755\ndiff" in text
    assert b"new file mode 100755\n--- /dev/null\n+++ b/new/script\n@@ -0,0 +1 @@\n+#!/bin/sh\n" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a", b"b"),
        (b"a\n", b"a"),
        (b"a", b"a\n"),
        (b"", b"a"),
        (b"a\n", b""),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"a\r\nb\n", b"a\nb\n"),
        (b"a\rb\x0cc\n", b"a\rb\x0cd\n"),
        (b"\xff\xfe text\n", b"\xff\xfd text\n"),
        (b"-- sql\n", b"++ sql\n"),
        (b"\0\1\2" * 100, b"\0\1\3" * 90),
        (b"text\n", b"\0binary"),
        (bytes(range(256)) * 40, b""),
    ],
)
def test_contents(before: Path, after: Path, old: bytes, new: bytes) -> None:
    write(before, "f", old)
    write(after, "f", new)
    write(after, "added", new)
    write(before, "deleted", old)
    assert_reproduced(before, after)


@pytest.mark.parametrize(
    "name",
    [
        "with blank",
        ' "quoted" ',
        "back\\slash",
        "new\nline",
        "tab\there",
        "größe-文件",
        os.fsdecode(b"no-\xff-utf8"),
        "x b/x",
        "-dash",
        "a b/c d/e",
        "\x7f\x01",
    ],
)
def test_names(before: Path, after: Path, name: str) -> None:
    write(before, name, b"1\n")
    write(after, name, b"2\n")
    write(after, name + "1", b"1\n")
    write(after, name + "2", b"")
    write(before, name + "3", b"", 0o644)
    write(after, name + "3", b"", 0o755)
    write(before, name + "4", b"\0")
    (after / (name + "5")).symlink_to(name)
    assert_reproduced(before, after)


def test_one_thing_becomes_another(before: Path, after: Path) -> None:
    write(before, "file_to_link", b"1\n")
    (after / "file_to_link").symlink_to("x")
    (before / "link_to_file").symlink_to("x")
    write(after, "link_to_file", b"1\n")
    write(before, "file_to_folder", b"1\n")
    write(after, "file_to_folder/inner", b"1\n")
    write(before, "folder_to_file/inner", b"1\n")
    write(after, "folder_to_file", b"1\n")
    assert [(change.kind, change.path) for change in find_changes(before, after)][:2] == [
        ("deleted", "file_to_folder"),
        ("added", "file_to_folder/inner"),
    ]
    assert_reproduced(before, after)


def test_links_are_not_followed(before: Path, after: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write(secret, "key", b"sesame\n")
    (after / "file").symlink_to(secret / "key")
    (after / "folder").symlink_to(secret)
    found = find_changes(before, after)
    assert [change.path for change in found] == ["file", "folder"]
    assert b"sesame" not in make_patch(before, after, found).text


def test_skipped_and_special(before: Path, after: Path) -> None:
    write(after, ".git/config", b"1")
    write(after, "a/__pycache__/x.pyc", b"1")
    write(after, ".pytest_cache/x", b"1")
    write(after, "mine", b"1")
    os.mkfifo(after / "pipe")
    assert [change.path for change in find_changes(before, after)] == ["mine"]
    assert [path for path, _ in list_entries(after, {"mine"})] != []
    assert [change.path for change in find_changes(before, after, skipped={".git", "a", ".pytest_cache"})] == ["mine"]


def test_what_is_too_large_is_named(before: Path, after: Path) -> None:
    write(after, "large\n", b"x" * 2000)
    write(after, "small", b"1\n")
    made = make_patch(before, after, find_changes(before, after), max_file_bytes=1000)
    assert made.left_out == ["large\n"]
    assert made.text.startswith(b'# left out, too large: added "large\\n"\ndiff --git a/small')
    assert [path for path, _ in list_entries(applied(before, made.text))] == ["small"]
    many = make_patch(before, after, find_changes(before, after), max_bytes=1000)
    assert many.left_out == ["large\n"]


@pytest.mark.parametrize("seed", range(40))
def test_random_edits_apply(before: Path, after: Path, seed: int) -> None:
    chance = random.Random(seed)
    old = [b"%d\n" % chance.randrange(6) for _ in range(chance.randrange(60))]
    new = list(old)
    for _ in range(chance.randrange(1, 20)):
        at = chance.randrange(len(new) + 1)
        new[at : at + chance.randrange(3)] = [b"%d\n" % chance.randrange(6)] * chance.randrange(3)
    write(before, "f", b"".join(old))
    write(after, "f", b"".join(new)[: -1 if chance.random() < 0.3 else None])
    assert_reproduced(before, after)


def test_few_edits_are_told_as_few(before: Path, after: Path) -> None:
    lines = [b"%d\n" % number for number in range(1000)]
    write(before, "f", b"".join(lines))
    lines[10], lines[12] = b"x\n", b"y\n"
    del lines[500]
    write(after, "f", b"".join(lines))
    text = assert_reproduced(before, after)
    assert text.count(b"@@ -") == 2
    assert sum(line.startswith((b"+", b"-")) for line in text.splitlines()) == 2 + 5


def test_lines_made_to_be_costly_are_one_block(before: Path, after: Path) -> None:
    chance = random.Random(1)
    write(before, "f", b"".join(b"%d\n" % chance.randrange(2) for _ in range(200_000)))
    write(after, "f", b"".join(b"%d\n" % chance.randrange(2) for _ in range(200_000)))
    text = assert_reproduced(before, after)
    assert text.count(b"@@ -") == 1

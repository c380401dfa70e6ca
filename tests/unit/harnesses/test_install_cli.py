"""`polar harness`, run as its users run it; npm is a stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.harnesses import load_harness
from polar.harnesses.cache import find_cache_folder
from tests.unit.harnesses.stand_ins import Tools, put_on_path

POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()", "harness"]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return put_on_path(tmp_path / "tools", monkeypatch, executable="pi")


def polar(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*POLAR, *arguments], capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def listed(folder: Path) -> dict[str, Any]:
    done = polar("list", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_install_list_and_remove(tmp_path: Path, tools: Tools) -> None:
    cache = tmp_path / "installed"
    (tmp_path / "polar.toml").write_text(f"[node]\nharness_cache = {json.dumps(str(cache))}\n")
    done = polar("install", "pi", "pi@0.80.0", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    package = load_harness("pi").package
    assert package is not None
    assert f"pi: npm install {package.name}@{package.version}\n" in done.stderr
    assert done.stdout.splitlines()[1] == f"pi 0.80.0 is installed (0 MB): {cache}/pi/0.80.0"
    again = polar("install", "pi", "--json", folder=tmp_path)
    (made,) = json.loads(again.stdout)
    assert (made["name"], made["version"], made["executable"]) == ("pi", package.version, "pi")
    assert subprocess.check_output([f"{made['folder']}/bin/pi", "hello"], text=True) == "agent hello\n"
    (cache / "pi" / "0.80.0" / "bin" / "pi").write_text("")
    rows = listed(tmp_path)
    assert (rows["pi"]["version"], rows["codex"]["installed"], rows["shell"]["package"]) == (package.version, [], None)
    found = {one["version"]: one["damage"] for one in rows["pi"]["installed"]}
    assert found.pop(package.version) is None
    assert found.pop("0.80.0").startswith("bin/pi has 0 bytes")
    table = polar("list", folder=tmp_path).stdout
    assert "damaged" in table
    assert "needs none" in table
    assert polar("remove", "pi@0.80.0", folder=tmp_path).stdout == "pi 0.80.0 is removed\n"
    assert [one["version"] for one in listed(tmp_path)["pi"]["installed"]] == [package.version]
    assert polar("remove", "pi", folder=tmp_path).returncode == 0
    assert listed(tmp_path)["pi"]["installed"] == []


def test_mistakes_are_told_before_anything_is_done(tmp_path: Path, tools: Tools) -> None:
    for arguments, told in (
        (("install", "pi", "nobody"), "there is no 'nobody'"),
        (("install", "shell"), "shell needs no installation"),
        (("remove", "pi@1.0"), "pi@1.0 is not installed in"),
    ):
        done = polar(*arguments, "--cache", str(tmp_path / "cache"), folder=tmp_path)
        assert done.returncode == 1
        assert told in done.stderr
    assert tools.installed() == []


def test_the_cache_is_the_users_unless_another_is_named(tmp_path: Path) -> None:
    home = Path.home()
    assert find_cache_folder(None, {}) == home / ".cache" / "polar" / "harnesses"
    assert find_cache_folder(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "polar" / "harnesses"
    assert find_cache_folder("~/harnesses", {"XDG_CACHE_HOME": str(tmp_path)}) == home / "harnesses"
    assert find_cache_folder("here", {}) == Path(os.getcwd(), "here")

"""Installing: whole or not at all, once, and never in the way of another."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.harnesses.base import Package
from polar.harnesses.cache import Marker, find_damage, find_installation, list_installations, seal
from polar.harnesses.install import install, remove
from polar.harnesses.install.tools import InstallError, write_wrapper
from tests.unit.harnesses.stand_ins import Tools, harness, put_on_path

KILLED = """
import asyncio, sys
from pathlib import Path
from polar.harnesses.install import install
from tests.unit.harnesses.stand_ins import harness
asyncio.run(install(harness(), None, Path(sys.argv[1]), lambda step: None))
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return put_on_path(tmp_path / "tools", monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "a cache"


def quiet(step: str) -> None: ...


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def left(cache: Path) -> list[str]:
    """All that a harness has in the cache, whole or not."""
    return sorted(os.listdir(cache / "agent"))


async def test_an_installation_runs_from_wherever_it_is_put(cache: Path, tools: Tools, tmp_path: Path) -> None:
    made = await install(harness(), None, cache, quiet)
    assert (made.name, made.version, made.folder) == ("agent", "1.2.3", cache / "agent" / "1.2.3")
    assert find_installation(cache, harness()) == made
    assert made.mount().target == "/opt/polar/harnesses/agent"
    assert made.program_path() == "/opt/polar/harnesses/agent/bin/agent"
    moved = shutil.copytree(made.folder, tmp_path / "else where", symlinks=True)
    shutil.rmtree(cache)
    (tmp_path / "link").symlink_to(moved / "bin" / "agent")
    for program in (moved / "bin" / "agent", Path("else where/bin/agent"), tmp_path / "link"):
        assert subprocess.check_output([program, "x", "y z"], cwd=tmp_path, text=True) == "agent x y z\n"  # noqa: ASYNC221


async def test_nothing_is_done_twice(cache: Path, tools: Tools) -> None:
    first, second = await asyncio.gather(*(install(harness(), None, cache, quiet) for _ in range(2)))
    assert first == second == await install(harness(), None, cache, quiet)
    assert tools.installed() == ["agent@1.2.3"]


def test_the_newest_version_comes_first(cache: Path) -> None:
    oldest_first = [
        *("1.0.dev1", "1.0a1", "1.0b2", "1.0.0-rc.2", "1.0.0-rc.10", "1.0rc11.dev1", "1.0rc11", "1.0rc11.post1"),
        *("1.0", "1.0+local.2", "1.0.post1.dev3", "1.0.post1", "1.0.post2", "1.0.1-0", "1.0.1", "1.1.0-beta", "1.1"),
    ]
    for version in sorted(oldest_first):
        program = cache / "agent" / version / "bin" / "agent"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        seal(program.parents[1], Marker("agent", version, "agent", "agent", 0))
    assert [one.version for one in list_installations(cache, "agent")] == oldest_first[::-1]


async def test_versions_stand_side_by_side(cache: Path, tools: Tools) -> None:
    for version in ("0.9.0", "0.10.0", "0.10.0-rc.1", "latest"):
        await install(harness(), version, cache, quiet)
    assert [one.version for one in list_installations(cache, "agent")] == ["9.9.9", "0.10.0", "0.10.0-rc.1", "0.9.0"]
    newest = find_installation(cache, harness())
    assert newest is not None
    assert newest.version == "9.9.9"
    await install(harness(), None, cache, quiet)
    pinned, other = find_installation(cache, harness()), find_installation(cache, harness(), "0.9.0")
    assert pinned is not None
    assert other is not None
    assert (pinned.version, other.version) == ("1.2.3", "0.9.0")
    assert find_installation(cache, harness(), "3.0.0") is None
    assert await remove(cache, "agent", "0.9.0", quiet) == ["0.9.0"]
    assert find_installation(cache, harness(), "0.9.0") is None
    assert await remove(cache, "agent", None, quiet) == ["0.10.0", "0.10.0-rc.1", "1.2.3", "9.9.9"]
    assert left(cache) == []


async def test_a_failure_says_what_npm_said_and_leaves_nothing(cache: Path, tools: Tools) -> None:
    tools.fail()
    with pytest.raises(InstallError, match="E404 no such package"):
        await install(harness(), None, cache, quiet)
    assert left(cache) == []


async def test_what_does_not_run_is_not_installed(cache: Path, tools: Tools) -> None:
    tools.program("echo no such library; exit 3")
    with pytest.raises(InstallError, match=r"exit code 3\): no such library"):
        await install(harness(), None, cache, quiet)
    assert left(cache) == []


async def test_a_cancelled_one_leaves_nothing(cache: Path, tools: Tools) -> None:
    tools.hold()
    installing = asyncio.create_task(install(harness(), None, cache, quiet))
    await until(lambda: tools.has_started)
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    assert left(cache) == []


async def test_after_a_killed_one_npm_is_waited_for_and_what_it_left_removed(cache: Path, tools: Tools) -> None:
    tools.hold()
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(cache))
    await until(lambda: tools.has_started)
    killed.kill()
    assert await killed.wait() == -signal.SIGKILL
    assert len(left(cache)) == 1
    assert find_installation(cache, harness()) is None
    steps: list[str] = []
    again = asyncio.create_task(install(harness(), None, cache, steps.append))
    await until(lambda: bool(steps))
    assert steps == ["waiting for another installation of agent"]
    tools.release()
    assert (await again).version == "1.2.3"
    assert left(cache) == ["1.2.3"]


async def test_a_damaged_one_is_told_and_made_anew(cache: Path, tools: Tools) -> None:
    made = await install(harness(), None, cache, quiet)
    assert find_damage(made) is None
    script = made.folder / "node_modules" / "agent" / "dist" / "cli.js"
    whole = script.stat().st_size
    os.truncate(script, 3)
    assert find_damage(made) == f"node_modules/agent/dist/cli.js has 3 bytes, not {whole}"
    script.unlink()
    assert find_damage(made) == "node_modules/agent/dist/cli.js is missing"
    assert find_damage(await install(harness(), None, cache, quiet)) is None
    for marker in (b"", b"{}"):
        (made.folder / "installed.json").write_bytes(marker)
        assert find_installation(cache, harness()) is None
        assert find_installation(cache, harness(), "1.2.3") is None
        assert await install(harness(), None, cache, quiet) == made
    (made.folder / "bin" / "agent").chmod(0o644)
    assert find_installation(cache, harness()) is None
    assert left(cache) == ["1.2.3"]


async def test_any_user_can_read_it(cache: Path, tools: Tools) -> None:
    before = os.umask(0o077)
    try:
        made = await install(harness(), None, cache, quiet)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in made.folder.rglob("*") if not path.is_symlink()}
    assert modes[made.folder / "bin" / "agent"] & 0o055 == 0o055
    assert all(
        mode & 0o044 == 0o044 for path, mode in modes.items() if path.name not in ("installed.json", "files.json")
    )
    assert all(mode & 0o011 == 0o011 for path, mode in modes.items() if path.is_dir())


async def test_what_cant_be_installed_is_said(
    cache: Path, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("../1.2.3", "1.2.3 --global", "--global", "1/2"):
        with pytest.raises(ConfigError, match="is not a version of agent"):
            await install(harness(), version, cache, quiet)
        assert find_installation(cache, harness(), version) is None
    with pytest.raises(InstallError, match="brings no command other"):
        await install(harness(Package("npm", "agent", "1.2.3", "other")), None, cache, quiet)
    python = Package("pypi", "agent", "1.2.3", "agent", requires_python="3.99")
    with pytest.raises(InstallError, match=r"needs Python 3\.99 or newer.* --python PATH"):
        await install(harness(python), None, cache, quiet)
    with pytest.raises(InstallError, match=r"needs Python <3, and .* is another one"):
        await install(
            harness(Package("pypi", "agent", "1", "agent", requires_python="<3")), None, cache, quiet, sys.executable
        )
    with pytest.raises(InstallError, match="/nowhere/python is no Python that runs here"):
        await install(harness(python), None, cache, quiet, "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match="npm is not on PATH: install Node"):
        await install(harness(), None, cache, quiet)
    assert tools.installed() == ["agent@1.2.3"]
    assert left(cache) == []


def test_the_wrapper_gives_the_harness_the_environment_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "it's here").mkdir()
    shutil.copy(shutil.which("env") or "", tmp_path / "it's here" / "env")
    write_wrapper(tmp_path, "program", "it's here/env")
    given = {"A": "1", "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "", "PYTHONPATH": "/x", "root": "theirs"}
    said = subprocess.check_output([tmp_path / "bin" / "program"], env=given, text=True)
    seen = dict(line.split("=", 1) for line in said.splitlines())
    assert {
        name: value for name, value in seen.items() if name not in ("PWD", "SHLVL", "_")
    } == given  # the shell's own

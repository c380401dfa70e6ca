"""What `polar harness install` made, in runtimes that have nothing for it: a shell, a few tools and the C library.
`make harnesses` installs them; podman is as docker."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.harnesses import load_harness
from polar.harnesses.cache import Installation, find_installation
from polar.plugins import list_names, load
from polar.runtimes.base import Runtime, RuntimeBackend, RuntimeSpec
from tests.contract.image import libraries
from tests.harnesses.run import ROOT

pytestmark = pytest.mark.harnesses

CACHE = ROOT / ".cache" / "polar-harnesses"
C_LIBRARY = ("m", "dl", "pthread", "rt", "util", "resolv")  # its other parts
IMAGE = "localhost/polar-bare:1"
NAMED = ("pi", "codex", "claude_code", "mini_swe_agent")  # the others are tested where they are installed
NODE = "console.log(require('child_process').execSync('env').toString())"
# The modules stand for the libraries that they are linked against, and for wheels whose libraries are the machine's.
PYTHON = """
import bz2, ctypes, curses, hashlib, lzma, sqlite3, ssl, subprocess, uuid, zlib
import numpy, pandas, pydantic_core, tokenizers
subprocess.run(["sh", "-c", "env"], check=True)
import readline  # which sets variables itself
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    for name in ("usr/bin", "etc", "tmp", "root", "proc", "sys", "dev"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(f"usr/{name}")
    for tool in ("sh", "bash", "env", "cat", "ls", "sleep", "chmod", "chown", "mkdir", "dirname"):
        program = Path(shutil.which(tool) or "").resolve()
        shutil.copy(program, folder / "usr" / "bin" / tool)
        needed = libraries(program)
        (c_library,) = (library for library in needed if library.name.startswith("libc.so."))
        for library in needed | {path for name in C_LIBRARY for path in c_library.parent.glob(f"lib{name}.so.*")}:
            inside = folder / "usr" / library.relative_to("/usr" if library.is_relative_to("/usr") else "/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library.resolve(), inside)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    names = {path.name for path in folder.rglob("*")}
    assert not {"node", "python3", "readlink", "libstdc++.so.6", "libssl.so.3"} & names
    return folder


@pytest.fixture(params=["local", "bubblewrap", "docker"])
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RuntimeBackend]:
    kind: RuntimeBackend = load("runtimes", request.param)(tmp_path / "state", "http://127.0.0.1:9")
    try:
        if (why := await kind.check_availability()) is not None:
            pytest.skip(f"no {kind.name} here: {why}")
        yield kind
    finally:
        await kind.close()


@pytest.fixture
def image(kind: RuntimeBackend, root: Path) -> str | None:
    """The bare root, as the kind takes it."""
    if kind.name == "local":
        return None
    if kind.name == "bubblewrap":
        return str(root)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(root, ".")
    subprocess.run([kind.name, "import", "-", IMAGE], input=packed.getvalue(), check=True, stdout=subprocess.DEVNULL)
    return IMAGE


def installed(name: str) -> Installation:
    found = find_installation(CACHE, load_harness(name))
    assert found is not None, f"{name} is not installed: run `make harnesses`"
    return found


async def runtime_with(kind: RuntimeBackend, image: str | None, *harnesses: Installation) -> Runtime:
    await kind.prepare(image)
    mounts = tuple(harness.mount() for harness in harnesses)
    runtime = await kind.create("bare", RuntimeSpec(image=image, mounts=mounts, env={"GIVEN": "1"}))
    await runtime.start()
    return runtime


async def said(runtime: Runtime, folder: Path, *argv: str) -> str:
    output = folder / "output"
    completed = await runtime.run(list(argv), output=output, timeout=120)
    text = output.read_text(errors="replace")
    assert completed.exit_code == 0, text
    return text


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line)


async def test_they_run_where_there_is_nothing_for_them(
    kind: RuntimeBackend, image: str | None, tmp_path: Path
) -> None:
    others = (find_installation(CACHE, load_harness(name)) for name in list_names("harnesses") if name not in NAMED)
    harnesses = [*map(installed, NAMED), *(other for other in others if other is not None)]
    runtime = await runtime_with(kind, image, *harnesses)
    for harness in harnesses:
        assert "--" in await said(runtime, tmp_path, runtime.path(harness.program_path()), "--help")
        if harness.name in ("pi", "codex", "claude_code"):
            assert harness.version in await said(runtime, tmp_path, runtime.path(harness.program_path()), "--version")


async def test_what_they_start_sees_the_runtimes_own_environment(
    kind: RuntimeBackend, image: str | None, tmp_path: Path
) -> None:
    pi, mini = installed("pi"), installed("mini_swe_agent")
    runtime = await runtime_with(kind, image, pi, mini)
    given = variables(await said(runtime, tmp_path, "sh", "-c", "env"))
    assert given["GIVEN"] == "1"
    node = runtime.path(f"{pi.mount().target}/node/bin/node")
    assert variables(await said(runtime, tmp_path, node, "-e", NODE)) == given
    (interpreter,) = (mini.folder / "python" / "bin").iterdir()
    python = runtime.path(f"{mini.mount().target}/python/bin/{interpreter.name}")
    assert variables(await said(runtime, tmp_path, python, "-I", "-c", PYTHON)) == given

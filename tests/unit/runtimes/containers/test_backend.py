"""Images that somebody removes from the engine while a node runs, with an engine that only keeps a list of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes.base import RuntimeSpec, SandboxError
from polar.runtimes.containers import Docker
from polar.runtimes.containers.cli import ContainerCli, ContainerCliError


class Engine:
    def __init__(self) -> None:
        self.images: set[str] = set()
        self.offered = {"plain"}  # what its registry has
        self.calls: list[str] = []

    async def call(self, *arguments: str, **_: Any) -> str:
        await asyncio.sleep(0)
        verb, image = arguments[0], arguments[-1]
        self.calls.append(verb)
        if verb == "pull" and image in self.offered:
            self.images.add(image)
        elif verb == "build":
            self.images.add(arguments[arguments.index("--tag") + 1])
        elif verb == "create" and self.images.isdisjoint(arguments):
            raise ContainerCliError("docker create", "Error response from daemon: No such image: plain:latest")
        elif verb in ("image", "pull") and image not in self.images:
            raise ContainerCliError(f"docker {verb}", f"Error: No such image: {image}")
        return "7" if verb == "image" else "made"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(ContainerCli, "call", lambda _, *arguments, **options: engine.call(*arguments, **options))
    return engine


@pytest.fixture
def kind(engine: Engine, tmp_path: Path) -> Docker:
    return Docker(tmp_path, "http://127.0.0.1:1")


@pytest.mark.parametrize("built", [False, True])
async def test_an_image_that_was_pruned_is_made_again(
    engine: Engine, kind: Docker, tmp_path: Path, built: bool
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM plain")
    spec = RuntimeSpec(image=f"build:{tmp_path}" if built else "plain")
    await kind.create("a", spec)
    assert engine.calls.count("build" if built else "pull") == 1
    engine.images.clear()
    await asyncio.gather(*(kind.create(id, spec) for id in "bcd"))
    assert engine.calls.count("build" if built else "pull") == 2


async def test_an_image_that_can_not_be_made_again(engine: Engine, kind: Docker) -> None:
    await kind.create("a", RuntimeSpec(image="plain"))
    engine.images.clear()
    engine.offered.clear()
    with pytest.raises(SandboxError, match="can't be fetched"):
        await kind.create("b", RuntimeSpec(image="plain"))

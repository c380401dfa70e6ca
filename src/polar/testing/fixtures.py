"""Fixtures for tests of agents. In conftest.py:

pytest_plugins = ["polar.testing.fixtures"]
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.testing.gateway import LoopbackGateway, ScriptedEngineServer


@pytest.fixture
def scripted_engine() -> Iterator[ScriptedEngineServer]:
    """An engine at `scripted_engine.url` that plays what `scripted_engine.play(...)` was given."""
    with ScriptedEngineServer.open() as engine:
        yield engine


@pytest.fixture
def polar_gateway(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> Iterator[LoopbackGateway]:
    """A gateway in front of the scripted engine, with a session: `url`, `key`, `base_urls`, `environment()`; afterwards
    `exchanges()` and `trajectory()`."""
    with LoopbackGateway.open(tmp_path / "polar", engine_url=scripted_engine.url) as gateway:
        yield gateway

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from polar.store.relational import RelationalStore
from tests.unit.store.places import Place
from tests.unit.store.servers import Server, postgres_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(f"sqlite:{tmp_path / 'polar.db'}")
    running: Server = request.getfixturevalue("server")
    return Place(running.new_database())


@pytest_asyncio.fixture
async def store(place: Place) -> AsyncIterator[RelationalStore]:
    opened = place.open()
    yield opened
    await opened.close()
